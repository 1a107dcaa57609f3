"""distance_bias and sinks in the attention kernels: output and every gradient, against fp64 of the same inputs."""

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import fused as fused_attention
from fastformer.packing import Layout
from fastformer_kernels.attention.arguments import Arguments
from tests.kernels.attention_cases import (
    DTYPES,
    INF,
    LENGTHS,
    QUERIES,
    B,
    S,
    T,
    additive,
    fused,
    gaps,
    heads,
    left_padding,
    on_device,
    plain,
    take_the_fast_way,
)
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = needs_kernels
BOTH = ("distance_bias", "sinks")


def by_distance(H: int, positions: int) -> Tensor:
    return torch.randn(H, 2 * positions - 1, dtype=torch.float64)


def alibi(H: int, positions: int) -> Tensor:
    """-slope * distance, and the future hidden (Press et al. 2022)."""
    at = torch.arange(1 - positions, positions, dtype=torch.float64)
    return 2.0 ** -torch.arange(1, H + 1)[:, None] * torch.where(at > 0, -INF, at)


def check(inputs: list[Tensor], names: tuple[str, ...], dtype: torch.dtype, weights: bool = False, **rules) -> None:
    """Compare output and gradients of q, k, v, those that are named, and an additive mask."""
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rules.items()}
    if "mask" in moved and moved["mask"].is_floating_point():
        names, inputs = (*names, "mask"), [*inputs, moved.pop("mask").double()]
    op = attention_with_weights if weights else attention
    assert_as_accurate_as_reference(
        lambda *x: op(*x[:3], **dict(zip(names, x[3:], strict=True)), **moved), inputs, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16), (2, 2, 5, 7, 16), (1, 1, 37, 41, 40), (1, 2, 70, 139, 32), (1, 1, 139, 70, 64)]
)
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"causal": True, "alignment": "bottom_right"}], ids=str)
def test_shapes_and_causality(shape, dtype, rules):
    H, longest = shape[1], max(shape[2:4])
    check([*heads(*shape), by_distance(H, longest + 3), torch.randn(H, dtype=torch.float64)], BOTH, dtype, **rules)


RULES = {
    "key_lengths": lambda: {"key_lengths": LENGTHS},
    "to the last key of each": lambda: {
        "key_lengths": torch.tensor([S, 1, 9]),
        "query_lengths": QUERIES,
        "alignment": "bottom_right",
    },
    "causal to the last key of each": lambda: {
        "key_lengths": torch.tensor([S, 1, 9]),
        "query_lengths": QUERIES,
        "causal": True,
        "alignment": "bottom_right",
    },
    "left padding, causal": lambda: {"key_mask": left_padding(), "causal": True},
    "gaps and lengths": lambda: {"key_mask": gaps(), "key_lengths": LENGTHS},
    "window": lambda: {"window": (9, 3)},
    "window to the right, bottom_right": lambda: {"window": (None, 2), "alignment": "bottom_right"},
    "softcap, scale": lambda: {"softcap": 1.5, "scale": 0.3},
    "bool, fully masked rows": lambda: {"mask": (torch.rand(T, S) < 0.6) & (torch.arange(T) % 7 > 0)[:, None]},
    "additive, causal": lambda: {"mask": additive(B, 2, T, S), "causal": True},
    "everything": lambda: {
        "mask": additive(B, 1, T, S),
        "causal": True,
        "alignment": "bottom_right",
        "window": (40, None),
        "query_lengths": QUERIES,
        "key_lengths": torch.tensor([S, 40, 66]),
        "key_mask": gaps(),
        "softcap": 3.0,
    },
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rules(name, weights):
    """Two query heads of one key head; weights and their gradients, too."""
    inputs = [*heads(B, 2, T, S, 16, 1), by_distance(2, S + 1), torch.randn(2, dtype=torch.float64)]
    check(inputs, BOTH, torch.float32, weights, **RULES[name]())


@pytest.mark.parametrize("names", [BOTH[:1], BOTH[1:]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_without_the_other(names, dtype):
    given = {"distance_bias": by_distance(2, S), "sinks": 3 * torch.randn(2, dtype=torch.float64)}
    inputs = [*heads(B, 2, T, S, 16), *(given[name] for name in names)]
    check(inputs, names, dtype, causal=True, key_lengths=LENGTHS)


def test_alibi_hides_the_future_by_itself():
    check([*heads(1, 2, 70, 70, 16), alibi(2, 70)], BOTH[:1], torch.float32)


def test_many_positions_of_which_few_are_met():
    """The bias of a model reaches further than its batches: what is not met has the gradient 0."""
    inputs = [*heads(1, 1, 9, 7, 16), by_distance(1, 150)]
    check(inputs, BOTH[:1], torch.float32, alignment="bottom_right")


@pytest.mark.parametrize("fast", [False, True])
def test_lowest_numbers_hide_and_a_row_of_them_is_a_mean(fast, monkeypatch):
    """As with an additive mask: a log-sum-exp in one part would lose the number of keys. A sink outweighs them."""
    if fast:
        take_the_fast_way(monkeypatch)
    bias = by_distance(2, 40)
    bias[:, 30:] = torch.finfo(torch.float32).min  # of the first rows, all keys
    check([*heads(1, 2, 40, 35, 16), bias], BOTH[:1], torch.float32)
    check([*heads(1, 2, 40, 35, 16), bias, torch.randn(2, dtype=torch.float64)], BOTH, torch.float32)


PACKED = [([7, 0, 66, 20], None), ([5, 0, 70, 3], [9, 4, 0, 33]), ([0, 0], None), ([], None)]


@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rules",
    [{}, {"causal": True}, {"alignment": "bottom_right", "window": (20, 5)}, {"causal": True, "softcap": 2.0}],
    ids=str,
)
def test_packed(lengths, dtype, rules):
    layout = Layout.from_lengths(lengths[0], DEVICE)
    key_layout = layout if lengths[1] is None else Layout.from_lengths(lengths[1], DEVICE)
    shapes = (layout.total, 4, 16), (key_layout.total, 2, 16), (key_layout.total, 2, 16), (4, 2 * 75 - 1), (4,)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_accurate_as_reference(
        lambda q, k, v, bias, sinks: packed_attention(
            q, k, v, layout, key_layout, distance_bias=bias, sinks=sinks, **rules
        ),
        inputs,
        dtype,
    )


def test_packed_is_padded():
    lengths = [7, 66, 20]
    layout = Layout.from_lengths(lengths, DEVICE)
    q, k, v = (torch.randn(93, 2, 16, device=DEVICE) for _ in range(3))
    given = {"distance_bias": by_distance(2, 66).float().to(DEVICE), "sinks": torch.randn(2, device=DEVICE)}
    packed = fused(packed_attention, q, k, v, layout, causal=True, **given)
    padded = [fastformer.packing.unpack(x, layout).transpose(1, 2) for x in (q, k, v)]
    dense = fused(attention, *padded, causal=True, key_lengths=torch.tensor(lengths, device=DEVICE), **given)
    assert torch.equal(fastformer.packing.pack(dense.transpose(1, 2), layout), packed)


DECODING = {
    "one query": ((2, 4, 1, 139), {"alignment": "bottom_right"}),
    "three queries, the last at the end": ((2, 2, 3, 70), {"causal": True, "alignment": "bottom_right"}),
    "lengths, one of them 0": ((3, 4, 1, 139), {"key_lengths": [139, 0, 5], "alignment": "bottom_right"}),
    "padded queries": ((2, 4, 2, 70), {"query_lengths": [2, 1], "softcap": 2.0, "window": (None, 50)}),
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("names", [BOTH, BOTH[:1], BOTH[1:]], ids=str)
def test_decoding(name, kv_heads, names):
    (b, h, t, s), rules = DECODING[name]
    rules = {key: torch.tensor(x, device=DEVICE) if isinstance(x, list) else x for key, x in rules.items()}
    inputs = heads(b, h, t, s, 40, kv_heads)
    own = {"distance_bias": by_distance(h, s + 2), "sinks": 4 + torch.randn(h, dtype=torch.float64)}
    for dtype in DTYPES:
        given = {key: own[key].to(DEVICE, dtype) for key in names}
        with torch.no_grad():
            q, k, v = (x.to(DEVICE, dtype) for x in inputs)
            with fastformer.backend("triton"), poisoned():
                assert fused_attention.decodes(q, k, v, *given.values())
                found = attention(q, k, v, **rules, **given)
            exact = plain(
                attention, *(x.double() for x in (q, k, v)), **rules, **{key: x.double() for key, x in given.items()}
            )
        assert (found.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_a_trained_bias_or_sink_is_no_step_of_decoding():
    q, k, v = (x.detach() for x in on_device(*heads(1, 2, 1, 30, 16)))
    for own in (torch.randn(2, 59, device=DEVICE), torch.randn(2, device=DEVICE)):
        own.requires_grad_()
        name = BOTH[own.dim() == 1]
        (found,) = gradients(fused(attention, q, k, v, **{name: own}), [own])
        (expected,) = gradients(plain(attention, q, k, v, **{name: own}), [own])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rules", [{}, {"causal": True, "window": (30, None)}], ids=str)
def test_gradients_use_the_mask_of_the_forward_pass(rules, fast, monkeypatch):
    """The mask of dropout is read off the weights; the gradients must be those of plain attention with that mask."""
    if fast:
        take_the_fast_way(monkeypatch)
    inputs = on_device(*heads(2, 2, 40, 70, 16, 1), by_distance(2, 70), torch.randn(2))
    run = lambda *x: dict(zip(BOTH, x, strict=True))  # noqa: E731
    out, dropped = fused(attention_with_weights, *inputs[:3], dropout_p=0.4, **run(*inputs[3:]), **rules)
    found = gradients(out, inputs)
    _, weights = plain(attention_with_weights, *inputs[:3], **run(*inputs[3:]), **rules)
    keep = (dropped != 0).float() / 0.6
    expected = gradients(torch.matmul(weights * keep, inputs[2]), inputs)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


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
    for a, e in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_of_the_bias_is_the_same_every_time(parts, monkeypatch):
    """However many programs share the sequences: each sums in order."""
    from fastformer_kernels.host import launch

    monkeypatch.setattr(launch, "assumed", launch.assumed._replace(multiprocessors=1 if parts == 1 else 1000))
    inputs = on_device(*heads(3, 2, 70, 70, 16), by_distance(2, 70))
    found = []
    for _ in range(2):
        out = fused(attention, *inputs[:3], distance_bias=inputs[3], causal=True)
        found.append(torch.autograd.grad(out.square().sum(), inputs[3])[0])
    assert torch.equal(*found)
    out = plain(attention, *inputs[:3], distance_bias=inputs[3], causal=True)
    torch.testing.assert_close(found[0], torch.autograd.grad(out.square().sum(), inputs[3])[0], rtol=1e-4, atol=1e-5)


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


def test_the_second_derivative_goes_through_the_formula():
    x = on_device(*heads(1, 2, 5, 7, 16), by_distance(2, 7), torch.randn(2))
    layout, found = Layout.from_lengths([2, 3], DEVICE), []
    for packed in (False, True):
        for run in (fused, plain):
            q, k, v = (t[0].transpose(0, 1)[:5] if packed else t for t in x[:3])
            given = {"distance_bias": x[3], "sinks": x[4], "causal": True}
            out = run(packed_attention, q, k, v, layout, **given) if packed else run(attention, q, k, v, **given)
            first = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), x))
        for a, e in zip(*found[-2:], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", [(3,), (4,), (0, 4), (1, 3)], ids=str)
def test_only_the_gradients_that_are_wanted(wanted):
    x = on_device(*heads(1, 2, 20, 30, 16), by_distance(2, 30), torch.randn(2))
    x = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(x)]
    leaves = [x[i] for i in wanted]
    found, expected = (
        gradients(run(attention, *x[:3], distance_bias=x[3], sinks=x[4]), leaves) for run in (fused, plain)
    )
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("packed", [False, True])
def test_registered_ops_pass_opcheck(packed):
    bounds = torch.tensor([[0, 5, 0, 0, 5, 0, 0, 0], [5, 3, 5, 0, 3, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    shape = (8, 2, 16) if packed else (2, 2, 5, 16)
    q, k, v = (torch.randn(shape, device=DEVICE) for _ in range(3))
    own = {"distance_bias": by_distance(2, 6).float().to(DEVICE), "sinks": torch.randn(2, device=DEVICE)}
    settings = Arguments(queries=5, keys=5, scale=0.25, bounds=bounds if packed else None, **own)
    ops = torch.ops.fastformer
    out, lse = ops.attention_forward(q, k, v, *settings)
    assert lse.shape == ((2, 2, 8) if packed else (2, 2, 2, 5))
    given = (out, q, k, v, out, lse, None, None, True, True, False)
    delta = ops.attention_backward(*given, *settings)[-1]
    assert delta.shape == lse.shape[1:]
    calls = [
        (ops.attention_forward, (q, k, v, *settings)),
        (ops.attention_backward, (*given, *settings)),
        (ops.attention_bias_gradient, (out, q, k, v, lse, delta, None, *settings)),
    ]
    if not packed:
        calls.append((ops.attention_weights, (q, k, lse, *settings)))
        calls.append((ops.attention_decode, (q[:, :, :1], k, v, *settings._replace(queries=1))))
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
def test_empty_sizes(sizes):
    x = on_device(*heads(*sizes, 16), by_distance(2, 5), torch.randn(2))
    out = fused(attention, *x[:3], distance_bias=x[3], sinks=x[4])
    assert out.shape == x[0].shape
    assert not out.any()
    assert not any(g.any() for g in gradients(out, x))
