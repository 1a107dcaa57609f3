"""The fused attention kernels: every option, output and every gradient, against fp64 of the same inputs.

bf16 runs on a GPU and compiled only: the interpreter's bf16 matrix product is garbage.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.backend import BackendError
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import fused as fused_attention
from fastformer.packing import Layout
from fastformer_kernels.attention.settings import Settings
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, INTERPRETED, assert_as_accurate_as_reference, needs_kernels, poisoned

pytestmark = needs_kernels

INF = math.inf
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def heads(B: int, H: int, T: int, S: int, K: int, kv_heads: int | None = None) -> list[Tensor]:
    kv_heads = H if kv_heads is None else kv_heads
    return [torch.randn(B, h, n, K, dtype=torch.float64) for h, n in ((H, T), (kv_heads, S), (kv_heads, S))]


def check(inputs: list[Tensor], dtype: torch.dtype, **rules) -> None:
    mask = rules.pop("mask", None)
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rules.items()}
    if mask is None or mask.dtype == torch.bool:
        held = None if mask is None else mask.to(DEVICE)
        assert_as_accurate_as_reference(lambda q, k, v: attention(q, k, v, held, **moved), inputs, dtype)
    else:
        assert_as_accurate_as_reference(
            lambda q, k, v, m: attention(q, k, v, m, **moved), [*inputs, mask.double()], dtype
        )


# One query and key; smaller than a tile; prime; more than one tile both ways and no multiple of it; longer than wide.
SHAPES = [(1, 1, 1, 1, 16), (2, 2, 5, 7, 16), (1, 1, 37, 41, 40), (1, 1, 139, 70, 64), (1, 1, 70, 139, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"causal": True, "alignment": "bottom_right"}], ids=str)
def test_shapes_and_causality(shape, dtype, rules):
    check(heads(*shape), dtype, **rules)


@pytest.mark.parametrize("head_size", [1, 8, 16, 24, 40, 64, 72, 80, 96, 128, 160, 256])
def test_head_sizes(head_size):
    check(heads(1, 1, 19, 35, head_size), torch.float32, causal=True, alignment="bottom_right")


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("T", "S", "head_size", "rules"),
    [
        (530, 530, 64, {"causal": True}),
        (520, 300, 64, {"key_lengths": torch.tensor([270])}),
        (520, 520, 128, {"causal": True, "alignment": "bottom_right"}),
        (140, 170, 256, {"causal": True, "softcap": 5.0}),
    ],
    ids=str,
)
def test_tiles_of_long_sequences(T, S, head_size, rules, dtype):
    """16 bits have tiles of 128 queries and up to 128 keys here: whole tiles, cut ones, and the last of the queries."""
    check(heads(1, 1, T, S, head_size), dtype, **rules)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries(kv_heads, dtype):
    check(heads(2, 4, 40, 37, 16, kv_heads), dtype, causal=True)


B, T, S = 3, 40, 75  # fp32 tiles are 32 to 64 wide: whole tiles, cut tiles and tiles of padding alone all occur


def gaps() -> Tensor:
    mask = torch.rand(B, S) < 0.7
    mask[1] = False
    return mask


def left_padding() -> Tensor:
    return torch.arange(S) >= torch.tensor([[0], [66], [S]])


def additive(*shape: int) -> Tensor:
    mask = torch.randn(*shape)
    mask[..., 0, 1:3] = -INF
    return mask


LENGTHS = torch.tensor([S, 0, 66])
QUERIES = torch.tensor([T, 3, 33])
RULES = {
    "key_lengths": lambda: {"key_lengths": LENGTHS},
    "query_lengths": lambda: {"query_lengths": QUERIES},
    "int32 lengths, causal": lambda: {"key_lengths": LENGTHS.int(), "query_lengths": QUERIES.int(), "causal": True},
    "causal to the last key of each": lambda: {
        "key_lengths": torch.tensor([S, 1, 9]),
        "query_lengths": QUERIES,
        "causal": True,
        "alignment": "bottom_right",
    },
    "left padding, causal": lambda: {"key_mask": left_padding(), "causal": True},
    "gaps": lambda: {"key_mask": gaps()},
    "gaps and lengths": lambda: {"key_mask": gaps(), "key_lengths": LENGTHS},
    "window": lambda: {"window": (9, 3)},
    "causal window": lambda: {"window": (20, None), "causal": True, "alignment": "bottom_right"},
    "window to the right, lengths": lambda: {"window": (None, 2), "key_lengths": LENGTHS},
    "softcap": lambda: {"softcap": 1.5},
    "large softcap": lambda: {"softcap": 50.0},
    "softcap, mask": lambda: {"softcap": 2.0, "mask": additive(T, S)},
    "scale": lambda: {"scale": 0.3},
    "negative scale": lambda: {"scale": -0.3},
    "bool [T, S]": lambda: {"mask": torch.rand(T, S) < 0.6},
    "bool [B, 1, 1, S], as key mask": lambda: {"mask": gaps()[:, None, None]},
    "bool [B, 1, 1, S] and key mask": lambda: {"mask": gaps()[:, None, None], "key_mask": left_padding()},
    "bool [B, 1, T, S], causal": lambda: {"mask": torch.rand(B, 1, T, S) < 0.6, "causal": True},
    "additive [S]": lambda: {"mask": additive(1, S)[0]},
    "additive [T, S]": lambda: {"mask": additive(T, S)},
    "additive [T, 1]": lambda: {"mask": torch.randn(T, 1)},
    "additive [B, H, T, S], causal": lambda: {"mask": additive(B, 2, T, S), "causal": True},
    "additive [H, 1, S], lengths": lambda: {"mask": additive(2, 1, S), "key_lengths": LENGTHS},
    "everything": lambda: {
        "mask": additive(B, 1, T, S),
        "causal": True,
        "alignment": "bottom_right",
        "window": (40, None),
        "query_lengths": QUERIES,
        "key_lengths": torch.tensor([S, 40, 66]),
        "key_mask": gaps(),
        "softcap": 3.0,
        "scale": 0.7,
    },
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    rules = RULES[name]()
    H = 2 if "H" in name else 1
    check(heads(B, H, T, S, 16), torch.float32, **rules)


def test_windows_wider_than_tiles():
    """Some tiles are seen whole by all rows of a tile, some by none, and some are cut on either side."""
    check(heads(1, 1, 139, 139, 16), torch.float32, window=(100, 50))


def test_lengths_beyond_the_tensor_are_cut():
    """On a GPU nobody looks at them beforehand; no kernel may leave its tensor."""
    lengths = torch.tensor([-2, 9, 3], device=DEVICE)
    bounds = torch.ops.fastformer.attention_bounds(lengths, lengths, None, 3, 5, 7, False, False, lengths)
    assert bounds[:, 1].tolist() == [0, 5, 3]
    assert bounds[:, 4].tolist() == [0, 7, 3]


@pytest.mark.parametrize("name", ["int32 lengths, causal", "gaps", "everything"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rules_in_half_precision(name, dtype):
    check(heads(B, 1, T, S, 16), dtype, **RULES[name]())


def test_a_row_of_the_lowest_number_is_a_mean_over_all_keys():
    lowest = torch.zeros(4, 5)
    lowest[1] = torch.finfo(torch.float32).min
    check(heads(1, 1, 4, 5, 16), torch.float32, mask=lowest)


def fused(function, *inputs, **arguments):
    with fastformer.backend("triton"), poisoned():
        return function(*inputs, **arguments)


def plain(function, *inputs, **arguments):
    with fastformer.backend("reference"):
        return function(*inputs, **arguments)


def on_device(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]


@pytest.mark.parametrize("name", ["key_lengths", "causal window", "gaps", "additive [T, S]", "everything"])
def test_weights_and_their_gradient(name):
    rules = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in RULES[name]().items()}
    mask = rules.pop("mask", None)
    inputs = [*heads(B, 1, T, S, 16), *([] if mask is None else [mask.double()])]
    assert_as_accurate_as_reference(lambda *x: attention_with_weights(*x, **rules), inputs, torch.float32)
    # The weights alone, so that the output plays no part in the gradient.
    assert_as_accurate_as_reference(lambda *x: attention_with_weights(*x, **rules)[1], inputs, torch.float32)


def test_rows_that_see_nothing_are_zero_and_move_nothing():
    q, k, v = on_device(*heads(2, 1, 20, 30, 16))
    lengths = torch.tensor([0, 30], device=DEVICE)
    out, weights = fused(attention_with_weights, q, k, v, key_lengths=lengths)
    assert not out[0].any()
    assert not weights[0].any()
    for gradient in gradients(out, [q, k, v]):
        assert not gradient[0].any()
        assert torch.isfinite(gradient).all()


def test_what_padding_holds_does_not_matter():
    q, k, v = on_device(*heads(2, 2, 70, 70, 16))
    lengths = torch.tensor([70, 65], device=DEVICE)
    clean = fused(attention, q, k, v, query_lengths=lengths, key_lengths=lengths)
    expected = gradients(clean, [q, k, v])
    padding = (torch.arange(70, device=DEVICE) >= lengths[:, None])[:, None, :, None]
    dirty = [x.detach().masked_fill(padding, math.nan).requires_grad_() for x in (q, k, v)]
    out = fused(attention, *dirty, query_lengths=lengths, key_lengths=lengths)
    assert torch.equal(out, clean)
    for actual, wanted in zip(gradients(out, dirty), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_nan_and_infinity_stay_in_their_rows():
    q, k, v = (x.to(DEVICE, torch.float32) for x in heads(1, 1, 20, 30, 16))
    clean = fused(attention, q, k, v)
    q[0, 0, 3] = math.nan
    q[0, 0, 5, 0] = math.inf
    out = fused(attention, q, k, v)
    assert out[:, :, [3, 5]].isnan().all()  # of infinite scores the largest is taken away: inf - inf
    others = [i for i in range(20) if i not in (3, 5)]
    assert torch.equal(out[:, :, others], clean[:, :, others])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_scores_that_overflow_where_they_are_scaled():
    """Finite before: 1e17 * 1e18. torch's softmax of an infinite score is NaN, not a row that sees nothing.

    As which it would pass where the scale is a part of a multiply-add: finite - inf. Those are made by ptxas: where
    it has no part, as in the interpreter, inf - inf is NaN anyway.
    """
    q, k, v = (x.to(DEVICE, torch.float32) for x in heads(1, 1, 6, 40, 16))
    q[0, 0, 3], k[0, 0, 7] = 0.0, 0.0
    q[0, 0, 3, 0], k[0, 0, 7, 0] = 1e17, 1e18
    out = fused(attention, q, k, v, scale=1e5)
    assert out[:, :, 3].isnan().all()
    assert out[:, :, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal):
    lengths, key_lengths = [5, 0, 34, 1, 3], [5, 4, 66, 0, 3]
    layout, key_layout = (Layout.from_lengths(n, DEVICE) for n in (lengths, key_lengths))
    inputs = [torch.randn(n, h, 16, dtype=torch.float64) for n, h in ((43, 2), (78, 1), (78, 1))]
    for dtype in DTYPES:
        assert_as_accurate_as_reference(
            lambda q, k, v: packed_attention(q, k, v, layout, key_layout, causal=causal), inputs, dtype
        )
        assert_as_accurate_as_reference(
            lambda q, k, v: packed_attention(q, k, v, key_layout, causal=causal, window=(7, 7)),
            [torch.randn(78, 2, 16, dtype=torch.float64), *inputs[1:]],
            dtype,
        )


def test_bounds_are_made_once_a_layout(monkeypatch):
    """Layers of a model share them, in training after inference too; other rules or keys have bounds of their own."""
    made, make = [], fused_attention._bounds
    monkeypatch.setattr(fused_attention, "_bounds", lambda *x: (made.append(1), make(*x))[1])
    layout, key_layout = (Layout.from_lengths(x, DEVICE) for x in ([3, 0, 2], [1, 4, 2]))
    q, k = (torch.randn(x.total, 2, 16, device=DEVICE, requires_grad=True) for x in (layout, key_layout))
    with torch.inference_mode():
        fused(packed_attention, q, q, q, layout)
    for _ in range(2):
        fused(packed_attention, q, q, q, layout, causal=True).sum().backward()
        fused(packed_attention, q, k, k, layout, key_layout)
    assert len(made) == 2
    out = fused(packed_attention, q, k, k, layout, key_layout, causal=True, alignment="bottom_right")
    assert len(made) == 3
    with fastformer.backend("reference"):
        expected = packed_attention(q, k, k, layout, key_layout, causal=True, alignment="bottom_right")
    torch.testing.assert_close(out, expected)


def test_packed_is_padded():
    lengths = [7, 66, 20]
    layout = Layout.from_lengths(lengths, DEVICE)
    q, k, v = (torch.randn(93, 2, 16, device=DEVICE) for _ in range(3))
    packed = fused(packed_attention, q, k, v, layout, causal=True)
    padded = [fastformer.packing.unpack(x, layout).transpose(1, 2) for x in (q, k, v)]
    dense = fused(attention, *padded, causal=True, key_lengths=torch.tensor(lengths, device=DEVICE))
    assert torch.equal(fastformer.packing.pack(dense.transpose(1, 2), layout), packed)


@pytest.mark.parametrize("layout", ["time-major", "expanded", "every other", "one projection"])
def test_strides(layout):
    if layout == "time-major":
        x = [torch.randn(40, 2, 2, 16).permute(1, 2, 0, 3) for _ in range(3)]
    elif layout == "expanded":
        x = [torch.randn(1, 1, 40, 16).expand(2, 2, 40, 16) for _ in range(3)]
    elif layout == "every other":
        x = [torch.randn(2, 2, 40, 32)[..., ::2] for _ in range(3)]
    else:
        x = list(torch.randn(2, 40, 3, 2, 16).permute(2, 0, 3, 1, 4))
    x = [t.to(DEVICE).requires_grad_() for t in x]
    out, expected = fused(attention, *x, causal=True), plain(attention, *x, causal=True)
    torch.testing.assert_close(out, expected)
    # sum() sends back a gradient that is one number, expanded.
    for a, e in zip(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
def test_empty_sizes(sizes):
    q, k, v = on_device(*heads(*sizes, 16))
    for arguments in ({}, {"key_mask": torch.ones(sizes[0], sizes[3], dtype=torch.bool, device=DEVICE)}):
        out = fused(attention, q, k, v, **arguments)
        assert out.shape == q.shape
        assert not out.any()
        assert not any(g.any() for g in gradients(out, [q, k, v]))
        assert fused(attention_with_weights, q, k, v, **arguments)[1].shape == (*q.shape[:3], k.shape[2])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_only_the_gradients_that_are_wanted(wanted, monkeypatch):
    asked, backward = [], fused_attention._backward
    monkeypatch.setattr(fused_attention, "_backward", lambda *x: asked.append(x[8:10]) or backward(*x))
    x = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(on_device(*heads(1, 2, 20, 30, 16)))]
    leaves = [x[i] for i in wanted]
    found, expected = (gradients(run(attention, *x), leaves) for run in (fused, plain))
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert asked == [(0 in wanted, 1 in wanted or 2 in wanted)]


def identity(n: int) -> Tensor:
    return torch.eye(n, device=DEVICE)[None, None]


@pytest.mark.slow
def test_dropout_keeps_its_rate_and_its_scale():
    p, n = 0.3, 64
    q, k = (torch.randn(2, 3, m, n, device=DEVICE) for m in (100, n))
    v = identity(n).expand(2, 3, n, n)
    before = fused(attention, q, k, v)  # v is the identity: the output is the weights
    torch.manual_seed(1)
    after = fused(attention, q, k, v, dropout_p=p)
    dropped, count = int((after == 0).sum()), after.numel()
    assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))
    for dim in range(4):  # no batch, head, query or key is favoured
        share = (after == 0).double().transpose(0, dim).flatten(1).mean(1)
        deviation = math.sqrt(p * (1 - p) * share.numel() / count)
        assert (share - p).abs().max() < 5 * deviation
    kept = after != 0
    torch.testing.assert_close(after[kept], before[kept] / (1 - p), rtol=1e-4, atol=0)
    torch.manual_seed(1)
    assert torch.equal(fused(attention, q, k, v, dropout_p=p), after)
    assert not torch.equal(fused(attention, q, k, v, dropout_p=p), after)
    torch.manual_seed(1)
    out, weights = fused(attention_with_weights, q, k, v, dropout_p=p)
    assert torch.equal(out, after)
    torch.testing.assert_close(weights, after)  # the weights returned are those applied
    assert not fused(attention, q, k, v, dropout_p=1.0).any()


def take_the_fast_way(monkeypatch) -> None:
    """Add dQ with atomics also where memory is poisoned, which asks torch for deterministic algorithms."""
    backward = fused_attention._backward
    monkeypatch.setattr(fused_attention, "_backward", lambda *x: backward(*x[:10], True, *x[11:]))


@pytest.mark.parametrize(
    "rules", [{}, {"causal": True}, {"key_lengths": torch.tensor([70, 66])}, {"softcap": 1.0}], ids=str
)
@pytest.mark.parametrize("fast", [False, True])
def test_gradients_use_the_mask_of_the_forward_pass(rules, fast, monkeypatch):
    """The mask is read off the weights; the gradients must be those of plain attention with that mask."""
    rules = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in rules.items()}
    q, k, v = on_device(*heads(2, 2, 40, 70, 16, 1))  # two query heads of one key head have masks of their own
    bias = torch.randn(40, 70, device=DEVICE, requires_grad=True)
    if fast:
        take_the_fast_way(monkeypatch)
    out, dropped = fused(attention_with_weights, q, k, v, bias, dropout_p=0.4, **rules)
    found = gradients(out, [q, k, v, bias])
    _, weights = plain(attention_with_weights, q, k, v, bias, **rules)
    keep = (dropped != 0).float() / 0.6
    expected = gradients(torch.matmul(weights * keep, v), [q, k, v, bias])
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


# numpy, under the interpreter, reports what is hidden or dropped later.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("fast", [False, True])
def test_padding_does_not_outweigh_scores_far_below_zero(fast, monkeypatch):
    """A padded key scores 0: its weight, beside real scores of 2^-144, is infinite until it is hidden.

    Not in fp32, whose masks come before the exponential, and whose log-sum-exp of -144 rounds by 2^-17.
    """
    if fast:
        take_the_fast_way(monkeypatch)
    q, k, v = heads(3, 2, 70, 139, 16)  # rows of more than one tile
    q, k = 0.1 * q + 5, 0.1 * k - 5
    at = torch.arange(139)
    for dtype in set(DTYPES) - {torch.float32}:
        check((q, k, v), dtype, key_mask=torch.stack([at >= 70, at < 100, at % 50 != 7]))
        check((q, k, v), dtype, key_lengths=torch.tensor([139, 70, 100]))


def test_delta_has_a_kernel_only_where_dq_has_none(monkeypatch):
    from fastformer_kernels.attention import backward as attention_backward
    from fastformer_kernels.attention import delta as attention_delta

    launched = []
    for module in (attention_backward, attention_delta):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda kernel, *x, launch=launch, **y: launched.append(kernel) or launch(kernel, *x, **y)
        )
    q, k, v, settings = op_arguments(False, False)
    q, k, v = q.half(), k.half(), v.half()  # fp32 has no registers for it in the kernel of dQ
    dout, added = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    out, lse = torch.ops.fastformer.attention_forward(q, k, v, *settings)
    for dweights in (None, torch.zeros(*q.shape[:3], 7, dtype=q.dtype, device=DEVICE)):
        deltas = []
        given = (dout, q, k, v, out, lse, None if dweights is None else added, dweights)
        for wants_q, wants_keys, fast in itertools.product((False, True), repeat=3):
            launched.clear()
            deltas.append(torch.ops.fastformer.attention_backward(*given, wants_q, wants_keys, fast, *settings)[-1])
            fused_dq = wants_q and not (fast and wants_keys)
            assert launched.count(attention_backward._attention_queries) == fused_dq
            assert launched.count(attention_delta._attention_delta) == (not fused_dq)
        assert all(torch.equal(delta, deltas[0]) for delta in deltas)
        torch.testing.assert_close(deltas[0], (out.float() * dout.float()).sum(-1) + (0 if dweights is None else added))


def test_the_fast_backward_pass(monkeypatch):
    take_the_fast_way(monkeypatch)
    check(heads(2, 4, 70, 139, 16, 2), torch.float32, causal=True, key_lengths=torch.tensor([139, 66]))
    check(heads(2, 2, 70, 75, 16), torch.float16, key_lengths=torch.tensor([75, 9]))
    layout = Layout.from_lengths([5, 0, 70], DEVICE)
    inputs = [torch.randn(75, 2, 16, dtype=torch.float64) for _ in range(3)]
    assert_as_accurate_as_reference(lambda *x: packed_attention(*x, layout, causal=True), inputs, torch.float32)


def test_deterministic_algorithms_close_the_fast_way(monkeypatch):
    q, k, v = on_device(*heads(1, 1, 5, 7, 16))
    fastformer.allow_nondeterminism()
    asked = []
    original = fused_attention._backward
    monkeypatch.setattr(fused_attention, "_backward", lambda *x: asked.append(x[10]) or original(*x))
    try:
        with fastformer.backend("triton"):
            gradients(attention(q, k, v), [q, k, v])
        gradients(fused(attention, q, k, v), [q, k, v])  # deterministic algorithms are asked for
    finally:
        fastformer.allow_nondeterminism(False)
    assert asked == [True, False]


def test_the_second_derivative_goes_through_the_formula():
    x = on_device(*heads(1, 2, 5, 7, 16))
    mask = torch.randn(5, 7, device=DEVICE, requires_grad=True)
    found = []
    for run in (fused, plain):
        out = run(attention, *x, mask, causal=True)
        first = torch.autograd.grad(out.square().sum(), [*x, mask], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [*x, mask]))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    out = fused(attention, *x, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="second derivative of attention with dropout needs backend 'reference'"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_autocast_runs_in_low_precision():
    q, k, v = on_device(*heads(1, 1, 20, 30, 16))
    with torch.autocast(DEVICE, torch.float16):
        out = fused(attention, q, k, v)
    assert out.dtype == torch.float16
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert dq.dtype == torch.float32


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (heads(1, 1, 2, 2, 320), "attention takes head sizes from 1 to 256, not 320"),
        ([*heads(1, 1, 2, 2, 16)[:2], torch.zeros(1, 1, 2, 8).double()], "not 16 for q and k and 8 for v"),
    ],
)
def test_what_the_kernels_cannot_take(inputs, reason):
    inputs = [x.to(DEVICE, torch.float32) for x in inputs]
    with pytest.raises(BackendError, match=reason):
        fused(attention, *inputs)
    attention(*inputs)  # backend "auto" falls back


DECODING = {
    "one query": ((2, 4, 1, 139), {}),
    "three queries, the last at the end": ((2, 2, 3, 70), {"causal": True, "alignment": "bottom_right"}),
    "lengths, one of them 0": ((3, 4, 1, 139), {"key_lengths": torch.tensor([139, 0, 5])}),
    "gaps and a window": ((2, 4, 1, 139), {"key_mask": torch.rand(2, 139) < 0.5, "window": (70, None)}),
    "padded queries": ((2, 4, 2, 70), {"query_lengths": torch.tensor([2, 1]), "softcap": 2.0}),
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", DECODING)
def test_decoding_splits_the_keys(name, kv_heads):
    (b, h, t, s), rules = DECODING[name]
    rules = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in rules.items()}
    inputs = heads(b, h, t, s, 40, kv_heads)
    for dtype in DTYPES:
        with torch.no_grad():
            q, k, v = (x.to(DEVICE, dtype) for x in inputs)
            with fastformer.backend("triton"), poisoned():
                assert fused_attention._decodes(q, k, v)
                found = attention(q, k, v, **rules)
            with fastformer.backend("reference"):
                exact = attention(*(x.to(dtype).double().to(DEVICE) for x in inputs), **rules)
        assert found.dtype == dtype
        assert (found.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def op_arguments(packed: bool, options: bool) -> tuple[Tensor, Tensor, Tensor, Settings]:
    """Tensors and settings as the registered ops take them."""
    bounds = torch.tensor([[0, 5, 0, 0, 5, 0, 0, 0], [5, 3, 5, 0, 3, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    if packed:
        q, k, v = (torch.randn(8, 2, 16, device=DEVICE) for _ in range(3))
        return q, k, v, Settings(queries=5, keys=5, scale=0.25, right=0, bounds=bounds)
    q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (5, 7, 7))
    mask = torch.randn(5, 7, device=DEVICE) if options else None
    seed = torch.tensor([3], device=DEVICE) if options else None
    dropout_p = 0.1 if options else 0.0
    settings = Settings(queries=5, keys=7, scale=0.25, shift=2, right=0, dropout_p=dropout_p, mask=mask, seed=seed)
    return q, k, v, settings


@pytest.mark.parametrize(("packed", "options"), [(False, False), (False, True), (True, False)])
def test_registered_ops_pass_opcheck(packed, options):
    q, k, v, settings = op_arguments(packed, options)
    ops = torch.ops.fastformer
    out, lse = ops.attention_forward(q, k, v, *settings)
    given = (out, q, k, v, out, lse, None, None)
    calls = [
        (ops.attention_forward, (q, k, v, *settings)),
        (ops.attention_backward, (*given, True, True, False, *settings)),
        (ops.attention_backward, (*given, True, False, False, *settings)),
        (ops.attention_backward, (*given, False, False, False, *settings)),
    ]
    if not packed:
        calls.append((ops.attention_weights, (q, k, lse, *settings)))
        if options:
            delta = ops.attention_backward(*given, False, False, False, *settings)[-1]
            calls.append((ops.attention_mask_gradient, (out, q, k, v, lse, delta, None, *settings)))
        else:
            calls.append((ops.attention_decode, (q[:, :, :1], k, v, *settings._replace(queries=1))))
    lengths = torch.tensor([0, 5, 8], device=DEVICE)
    calls.append((ops.attention_bounds, (lengths, lengths, None, 2, 5, 5, True, False, q)))
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(ops.attention_forward.default, calls[0][1], test_utils="test_aot_dispatch_dynamic")
