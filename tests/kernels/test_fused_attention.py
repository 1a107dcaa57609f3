"""The fused attention kernels: every option, output and every gradient, against fp64 of the same inputs.

bf16 runs on a GPU and compiled only: the interpreter's bf16 matrix product is garbage.
"""

import math

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
    RULES,
    B,
    S,
    T,
    check,
    check_decoding,
    check_empty,
    fused,
    heads,
    on_device,
    plain,
)
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, assert_as_accurate_as_reference, needs_kernels

pytestmark = needs_kernels


# One query and key; smaller than a tile; prime; more than one tile both ways and no multiple of it; longer than wide.
SHAPES = [(1, 1, 1, 1, 16), (2, 2, 5, 7, 16), (1, 1, 37, 41, 40), (1, 1, 139, 70, 64), (1, 1, 70, 139, 32)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"causal": True, "alignment": "bottom_right"}], ids=str)
def test_shapes_and_causality(shape, dtype, rules):
    check(heads(*shape), dtype, **rules)


@pytest.mark.parametrize("head_size", [1, 8, 13, 16, 24, 40, 64, 72, 80, 96, 128, 160, 256])
def test_head_sizes(head_size):
    check(heads(1, 1, 19, 35, head_size), torch.float32, causal=True, alignment="bottom_right")


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("T", "S", "head_size", "rules"),
    [
        (515, 530, 32, {"causal": True}),
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
    q, k, v = (torch.randn(3, 2, n, 16, device=DEVICE) for n in (1, 7, 7))
    arguments = {"queries": 1, "keys": 7, "scale": 0.25}
    decoded = [
        torch.ops.fastformer.attention_decode(q, k, v, *Arguments(**arguments, bounds=x))
        for x in (lengths, lengths.clamp(0, 7))
    ]
    assert torch.equal(*decoded)


def begun_at(x: Tensor, element: int, columns: int) -> Tensor:
    """Copy x into rows of so many columns, which begin at an element of an aligned tensor."""
    rows = x.new_zeros(element + columns * x[..., 0].numel())[element:].view(*x.shape[:-1], columns)
    return rows[..., : x.shape[-1]].copy_(x)


@pytest.mark.parametrize(
    ("sizes", "elements", "columns"),
    [
        pytest.param((64, 64), (4, 0, 0), (64, 64, 64), id="queries within 16 bytes"),
        pytest.param((64, 64), (0, 4, 0), (64, 64, 64), id="keys within 16 bytes"),
        pytest.param((64, 64), (0, 0, 4), (64, 64, 64), id="values within 16 bytes"),
        pytest.param((17, 16), (0, 0, 0), (24, 24, 16), id="odd head size"),
    ],
)
def test_rows_load_in_whole_vectors_of_all_tensors_or_of_none(sizes, elements, columns):
    """Else Triton 3.7 omitted a fence before the product with the values, which `--compiled sm_90` shows."""
    from fastformer_kernels.attention.problem import views

    inputs = [x.to(DEVICE, torch.float16) for x in heads(1, 2, 70, 70, sizes[0], V=sizes[1])]
    results = []
    for moved in (False, True):
        leaves = [x.clone() for x in inputs]
        if moved:
            leaves = list(map(begun_at, leaves, elements, columns))
            align, seen = views(*leaves)
            assert align == 1 or not any(x.data_ptr() % 16 or x.shape[-1] % align for x, _ in seen)
        out = fused(attention, *(x.requires_grad_() for x in leaves))
        results.append([out, *gradients(out, leaves)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=2e-3)


def test_copies_of_expanded_masks_are_expanded():
    """Else an odd number of keys would copy a mask of all heads once for each head, in each kernel."""
    from fastformer_kernels.attention.problem import with_aligned_rows

    mask = torch.rand(1, 3, 1, 7, 5, device=DEVICE)[0]
    expanded = mask.expand(3, 4, 7, 5)
    copy = with_aligned_rows(expanded)
    assert torch.equal(copy, expanded)
    assert copy.untyped_storage().nbytes() == 3 * 7 * 16 * 4
    check(heads(3, 4, 7, 5, 16), torch.float32, mask=(mask > 0.3).expand(3, 4, 7, 5))


@pytest.mark.parametrize("name", ["int32 lengths, causal", "gaps", "everything"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rules_in_half_precision(name, dtype):
    check(heads(B, 1, T, S, 16), dtype, **RULES[name]())


def test_softcaps_far_above_the_scores():
    """They change nothing: tanh(x) is about x, which 2 / (1 + exp(-2 x)) - 1 rounds at the size of 1."""
    for dtype in DTYPES[1:]:
        check(heads(1, 1, 20, 40, 16), dtype, softcap=1e6)
    check_decoding(heads(2, 4, 1, 139, 40), softcap=1e30)


def test_a_row_of_the_lowest_number_is_a_mean_over_all_keys():
    lowest = torch.zeros(4, 5)
    lowest[1] = torch.finfo(torch.float32).min
    check(heads(1, 1, 4, 5, 16), torch.float32, mask=lowest)


@pytest.mark.parametrize("name", ["key_lengths", "causal window", "gaps", "additive [T, S]", "everything"])
def test_weights_and_their_gradient(name):
    """Of some the weights alone, so that the output plays no part in the gradient."""
    alone = name in ("key_lengths", "additive [T, S]")
    op = (lambda *x, **rules: attention_with_weights(*x, **rules)[1]) if alone else attention_with_weights
    check(heads(B, 1, T, S, 16), torch.float32, op=op, **RULES[name]())


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
    inputs[0] = torch.randn(78, 2, 16, dtype=torch.float64)
    assert_as_accurate_as_reference(
        lambda q, k, v: packed_attention(q, k, v, key_layout, causal=causal, window=(7, 7)), inputs, DTYPES[-1]
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
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 2, 0, 0)])
def test_empty_sizes(sizes):
    x = on_device(*heads(*sizes, 16))
    for rules in ({}, {"key_mask": torch.ones(sizes[0], sizes[3], dtype=torch.bool, device=DEVICE)}):
        check_empty(x, **rules)
        assert fused(attention_with_weights, *x, **rules)[1].shape == (*x[0].shape[:3], sizes[3])


@pytest.mark.slow
def test_dropout_keeps_its_rate_and_its_scale():
    p, n = 0.3, 64
    q, k = (torch.randn(2, 2, m, n, device=DEVICE) for m in (70, n))
    v = torch.eye(n, device=DEVICE).expand(2, 2, n, n)
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
    assert len(kept.flatten(0, 1).unique(dim=0)) == 4  # each head of each sequence has a mask of its own
    torch.testing.assert_close(after[kept], before[kept] / (1 - p), rtol=1e-4, atol=0)
    torch.manual_seed(1)
    assert torch.equal(fused(attention, q, k, v, dropout_p=p), after)
    assert not torch.equal(fused(attention, q, k, v, dropout_p=p), after)
    torch.manual_seed(1)
    out, weights = fused(attention_with_weights, q, k, v, dropout_p=p)
    assert torch.equal(out, after)
    torch.testing.assert_close(weights, after)  # the weights returned are those applied
    assert not fused(attention, q, k, v, dropout_p=1.0).any()


def test_autocast_runs_in_low_precision():
    q, k, v = on_device(*heads(1, 1, 20, 30, 16))
    with torch.autocast(DEVICE, torch.float16):
        out = fused(attention, q, k, v)
    assert out.dtype == torch.float16
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert dq.dtype == torch.float32


DECODING = {
    "one query": ((2, 4, 1, 139), {}),
    "three queries, the last at the end": ((2, 2, 3, 139), {"causal": True, "alignment": "bottom_right"}),
    "lengths, one of them 0": ((3, 4, 1, 139), {"key_lengths": torch.tensor([139, 0, 5])}),
    "gaps and a window": ((2, 4, 1, 139), {"key_mask": torch.rand(2, 139) < 0.5, "window": (70, None)}),
    "padded queries": ((2, 4, 2, 70), {"query_lengths": torch.tensor([2, 1]), "softcap": 2.0}),
}


@pytest.mark.parametrize(("keys", "kernels"), [(190, 1), (1000, 2)])
def test_decoding_is_one_kernel_where_one_program_takes_all_keys_of_a_head(keys, kernels, monkeypatch):
    """Without a second one that combines shares, nor one that turns lengths into bounds."""
    from fastformer_kernels.attention import decode, problem

    launched = []
    for module in (decode, problem):
        launch = module.launch
        monkeypatch.setattr(module, "launch", lambda *x, launch=launch, **y: launched.append(x[0]) or launch(*x, **y))
    q, k, v = (x.to(DEVICE, torch.float16) for x in heads(2, 4, 1, keys, 32))
    with torch.no_grad():
        fused(attention, q, k, v, key_lengths=torch.tensor([keys, 3], device=DEVICE))
    assert len(launched) == kernels


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", DECODING)
def test_decoding_splits_the_keys(name, kv_heads):
    (b, h, t, s), rules = DECODING[name]
    check_decoding(heads(b, h, t, s, 40, kv_heads), **rules)
