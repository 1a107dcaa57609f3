"""Attention with distance_bias, sinks, and values of a head size of their own, as in multi-head latent attention.

Output and every gradient, against fp64 of the same inputs.
"""

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.backend import BackendError
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.packing import Layout
from fastformer_kernels.host import launch
from tests.kernels.attention_cases import (
    DTYPES,
    INF,
    LENGTHS,
    RULES,
    B,
    S,
    T,
    by_distance,
    check,
    check_decoding,
    check_empty,
    check_second_derivative,
    fused,
    heads,
    on_device,
    plain,
)
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels

pytestmark = needs_kernels
BOTH = ("distance_bias", "sinks")


def alibi(H: int, positions: int) -> Tensor:
    """-slope * distance, and the future hidden (Press et al. 2022)."""
    at = torch.arange(1 - positions, positions, dtype=torch.float64)
    return 2.0 ** -torch.arange(1, H + 1)[:, None] * torch.where(at > 0, -INF, at)


SHAPES = [(1, 1, 1, 1, 16), (2, 2, 5, 7, 16), (1, 1, 37, 41, 40), (1, 2, 70, 139, 32), (1, 1, 139, 70, 64)]
DIRECTIONS = [{}, {"causal": True}, {"causal": True, "alignment": "bottom_right"}]


@pytest.mark.parametrize(
    ("shape", "dtype", "rules"),
    [(shape, dtype, DIRECTIONS[(i + j) % 3]) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES)],
    ids=str,
)
def test_shapes_and_causality(shape, dtype, rules):
    H, longest = shape[1], max(shape[2:4])
    inputs = [*heads(*shape), by_distance(H, longest + 3), torch.randn(H, dtype=torch.float64)]
    check(inputs, dtype, BOTH, **rules)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("to the last key of each", False),
        ("left padding, causal", False),
        ("gaps and lengths", False),
        ("window", False),
        ("window to the right, bottom_right", False),
        ("softcap", False),
        ("bool [T, S], fully masked rows", True),
        ("additive [B, H, T, S], causal", False),
        ("everything", True),
    ],
)
def test_rules(name, weights):
    """Two query heads of one key head; weights and their gradients, too."""
    inputs = [*heads(B, 2, T, S, 16, 1), by_distance(2, S + 1), torch.randn(2, dtype=torch.float64)]
    check(inputs, torch.float32, BOTH, op=attention_with_weights if weights else attention, **RULES[name]())


@pytest.mark.parametrize("names", [BOTH[:1], BOTH[1:]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_without_the_other(names, dtype):
    given = {"distance_bias": by_distance(2, S), "sinks": 3 * torch.randn(2, dtype=torch.float64)}
    inputs = [*heads(B, 2, T, S, 16), *(given[name] for name in names)]
    check(inputs, dtype, names, causal=True, key_lengths=LENGTHS)


def test_alibi_hides_the_future_by_itself():
    check([*heads(1, 2, 70, 70, 16), alibi(2, 70)], torch.float32, BOTH[:1])


def test_many_positions_of_which_few_are_met():
    """The bias of a model reaches further than its batches: what is not met has the gradient 0."""
    inputs = [*heads(1, 1, 9, 7, 16), by_distance(1, 150)]
    check(inputs, torch.float32, BOTH[:1], alignment="bottom_right")


def test_lowest_numbers_hide_and_a_row_of_them_is_a_mean():
    """As with an additive mask: a log-sum-exp in one part would lose the number of keys. A sink outweighs them."""
    bias = by_distance(2, 40)
    bias[:, 30:] = torch.finfo(torch.float32).min  # of the first rows, all keys
    check([*heads(1, 2, 40, 35, 16), bias], torch.float32, BOTH[:1])
    check([*heads(1, 2, 40, 35, 16), bias, torch.randn(2, dtype=torch.float64)], torch.float32, BOTH)


TWO_LAYOUTS, ONE = ([5, 0, 70, 3], [9, 4, 0, 33]), ([7, 0, 66, 20], None)
WINDOW = {"alignment": "bottom_right", "window": (20, 5)}


@pytest.mark.parametrize(
    ("lengths", "H", "rules", "dtype"),
    [
        pytest.param(TWO_LAYOUTS, 4, {}, DTYPES[0], id="two layouts"),
        pytest.param(TWO_LAYOUTS, 2, WINDOW, DTYPES[-1], id="two layouts, window"),
        pytest.param(ONE, 2, {"causal": True}, DTYPES[1], id="causal"),
        pytest.param(ONE, 2, {"causal": True, "softcap": 2.0}, DTYPES[0], id="causal, softcap"),
        pytest.param(([0, 0], None), 2, {}, DTYPES[1], id="no tokens"),
        pytest.param(([], None), 2, {"causal": True}, DTYPES[0], id="no sequences"),
    ],
)
def test_packed(lengths, H, rules, dtype):
    """Two query heads of each key head."""
    layout = Layout.from_lengths(lengths[0], DEVICE)
    key_layout = layout if lengths[1] is None else Layout.from_lengths(lengths[1], DEVICE)
    keys = key_layout.total, H // 2, 16
    shapes = (layout.total, H, 16), keys, keys, (H, 2 * 75 - 1), (H,)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_accurate_as_reference(
        lambda q, k, v, bias, sinks: packed_attention(
            q, k, v, layout, key_layout, distance_bias=bias, sinks=sinks, **rules
        ),
        inputs,
        dtype,
    )


DECODING = {
    "one query": ((2, 4, 1, 139), {"alignment": "bottom_right"}),
    "three queries, the last at the end": ((2, 2, 3, 70), {"causal": True, "alignment": "bottom_right"}),
    "lengths, one of them 0": ((3, 4, 1, 139), {"key_lengths": [139, 0, 5], "alignment": "bottom_right"}),
    "padded queries": ((2, 4, 2, 70), {"query_lengths": [2, 1], "softcap": 2.0, "window": (None, 50)}),
}


@pytest.mark.parametrize(
    ("names", "name", "kv_heads"),
    [
        (BOTH[:1], "one query", 1),
        (BOTH[1:], "one query", 1),
        (BOTH, "one query", 2),
        (BOTH, "three queries, the last at the end", 2),
        (BOTH[:1], "lengths, one of them 0", 2),
        (BOTH, "lengths, one of them 0", 1),
        (BOTH[1:], "padded queries", 2),
        (BOTH, "padded queries", 1),
    ],
    ids=str,
)
def test_decoding(names, name, kv_heads):
    (b, h, t, s), rules = DECODING[name]
    rules = {key: torch.tensor(x) if isinstance(x, list) else x for key, x in rules.items()}
    own = {"distance_bias": by_distance(h, s + 2), "sinks": 4 + torch.randn(h, dtype=torch.float64)}
    check_decoding(heads(b, h, t, s, 40, kv_heads), {key: own[key] for key in names}, **rules)


def test_a_trained_bias_or_sink_is_no_step_of_decoding():
    q, k, v = (x.detach() for x in on_device(*heads(1, 2, 1, 30, 16)))
    for own in (torch.randn(2, 59, device=DEVICE), torch.randn(2, device=DEVICE)):
        own.requires_grad_()
        name = BOTH[own.dim() == 1]
        (actual,) = gradients(fused(attention, q, k, v, **{name: own}), [own])
        (expected,) = gradients(plain(attention, q, k, v, **{name: own}), [own])
        torch.testing.assert_close(actual, expected)


def test_packed_dropout_is_the_padded_one():
    """Seed, sequence, head and position decide what is dropped, packed or not: so do all gradients."""
    lengths = [40, 7]
    layout = Layout.from_lengths(lengths, DEVICE)
    inputs = on_device(*(torch.randn(2, 2, 40, 16) for _ in range(3)), by_distance(2, 40), torch.randn(2))
    given = {"distance_bias": inputs[3], "sinks": inputs[4], "dropout_p": 0.3}
    packed = [fastformer.packing.pack(x.transpose(1, 2), layout) for x in inputs[:3]]
    ends = torch.tensor(lengths, device=DEVICE)
    torch.manual_seed(3)
    out = fused(packed_attention, *packed, layout, **given)
    torch.manual_seed(3)
    dense = fused(attention, *inputs[:3], query_lengths=ends, key_lengths=ends, **given)
    expected = fastformer.packing.pack(dense.transpose(1, 2), layout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, inputs), gradients(expected, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_of_the_bias_is_the_same_every_time(parts, monkeypatch):
    """However many programs share the sequences: each sums in order."""
    monkeypatch.setattr(launch, "assumed", launch.assumed._replace(multiprocessors=1 if parts == 1 else 1000))
    inputs = on_device(*heads(3, 2, 40, 40, 16), by_distance(2, 40))
    actual = []
    for _ in range(2):
        out = fused(attention, *inputs[:3], distance_bias=inputs[3], causal=True)
        actual.append(torch.autograd.grad(out.square().sum(), inputs[3])[0])
    assert torch.equal(*actual)
    out = plain(attention, *inputs[:3], distance_bias=inputs[3], causal=True)
    torch.testing.assert_close(actual[0], torch.autograd.grad(out.square().sum(), inputs[3])[0], rtol=1e-4, atol=1e-5)


def test_half_precision_beside_a_bias_in_fp32():
    """As under autocast: the bias is read as it is, and its gradient is added up and returned in fp32."""
    q, k, v = on_device(*heads(2, 2, 40, 70, 16), dtype=torch.float16)
    bias, sinks = on_device(alibi(2, 70).clamp(min=-60), torch.randn(2))
    out = fused(attention, q, k, v, distance_bias=bias, sinks=sinks)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias, sinks)]
    expected = plain(attention, *exact[:3], distance_bias=exact[3], sinks=exact[4])
    assert (out - expected).abs().max() < 2e-3 * expected.abs().max()
    for a, e in zip(gradients(out, [bias, sinks]), gradients(expected, exact[3:]), strict=True):
        assert a.dtype == torch.float32
        assert (a - e).abs().max() < 2e-3 * e.abs().max()


def test_any_place_in_memory():
    """A slice of a table that all layers share: neither contiguous, nor on 16 bytes."""
    table = torch.randn(3, 2, 161, device=DEVICE).transpose(0, 1)
    q, k, v = (x.detach() for x in on_device(*heads(1, 2, 20, 40, 16)))
    for bias in (table[:, 1, 3:82], table[:, 0, ::2], table[:1, 0, :99].expand(2, -1)):
        given = {"distance_bias": bias, "sinks": table[:, 1, 5]}
        torch.testing.assert_close(fused(attention, q, k, v, **given), plain(attention, q, k, v, **given))


@pytest.mark.parametrize("packed", [False, True])
def test_the_second_derivative_goes_through_the_formula(packed):
    x = on_device(*heads(1, 2, 5, 7, 16), by_distance(2, 7), torch.randn(2))
    layout = Layout.from_lengths([2, 3], DEVICE)

    def call(run):
        q, k, v = (t[0].transpose(0, 1)[:5] if packed else t for t in x[:3])
        own = {"distance_bias": x[3], "sinks": x[4], "causal": True}
        return run(packed_attention, q, k, v, layout, **own) if packed else run(attention, q, k, v, **own)

    check_second_derivative(x, call)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
def test_empty_sizes(sizes):
    x = on_device(*heads(*sizes, 16), by_distance(2, 5), torch.randn(2))
    check_empty(x, {"distance_bias": x[3], "sinks": x[4]})


# ---- values of a head size of their own

# Smaller and larger than that of keys, of as wide a tile and of another; (192, 128) is that of DeepSeek-V2 (2024).
HEAD_SIZES = [(64, 128), (40, 56), (16, 1), (192, 128), (64, 32), (24, 200), (40, 72)]
CASES = [
    (K, V, DTYPES[i % len(DTYPES)])
    for i, (K, V) in enumerate([HEAD_SIZES[0], (64, 128), HEAD_SIZES[1], *HEAD_SIZES[1:]])
]


@pytest.mark.parametrize(("K", "V", "dtype"), CASES, ids=str)
def test_values_of_a_head_size_of_their_own(K, V, dtype):
    """Two query heads of one key head, more than one tile of keys, causal to the last of them."""
    check(heads(1, 2, 37, 70, K, 1, V), dtype, causal=True, alignment="bottom_right")


@pytest.mark.parametrize(("K", "V", "dtype"), [(40, 56, DTYPES[0]), (40, 16, DTYPES[1])], ids=str)
def test_every_option_with_weights_and_the_gradient_of_the_mask(K, V, dtype):
    """All that is no dropout, and dW: each loop with masks, and every kernel that reads values."""
    rules = {"causal": True, "alignment": "bottom_right", "window": (40, None), "softcap": 3.0, "scale": 0.7}
    rules |= {"key_mask": torch.rand(2, 70) < 0.8, "key_lengths": torch.tensor([70, 66])}
    rules |= {"query_lengths": torch.tensor([37, 30]), "mask": torch.randn(2, 1, 37, 70)}
    check(heads(2, 4, 37, 70, K, 2, V), dtype, op=attention_with_weights, **rules)


@pytest.mark.parametrize(("K", "V", "dtype"), [(16, 40, DTYPES[1]), (40, 16, DTYPES[0])], ids=str)
def test_packed_values(K, V, dtype):
    layout, key_layout = (Layout.from_lengths(n, DEVICE) for n in ([5, 0, 34, 1], [5, 4, 66, 0]))
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((40, 2, K), (75, 1, K), (75, 1, V))]
    assert_as_accurate_as_reference(
        lambda *x: packed_attention(*x, layout, key_layout, causal=True, window=(40, 0)), inputs, dtype
    )


@pytest.mark.parametrize(("K", "V"), [(40, 72), (192, 128), (16, 1)])
def test_decoding_values(K, V):
    check_decoding(heads(3, 4, 1, 139, K, 2, V), key_lengths=torch.tensor([139, 0, 5]))


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (0, 0)])
def test_no_queries_or_keys(sizes):
    check_empty(on_device(*heads(1, 2, *sizes, 16, 1, 24)))


@pytest.mark.parametrize(("K", "V"), [(16, 0), (16, 257), (320, 16)])
def test_head_sizes_that_the_kernels_cannot_take(K, V):
    inputs = [x.to(DEVICE, torch.float32) for x in heads(1, 2, 2, 3, K, 1, V)]
    with pytest.raises(BackendError, match=f"attention takes head sizes from 1 to 256, not {V if K == 16 else K}"):
        fused(attention, *inputs)
    assert attention(*inputs).shape == (1, 2, 2, V)  # backend "auto" falls back
