"""Large means and logits, infinities, NaN, a million rows, and attention in 16 bits, which is as accurate as SDPA.

On the reference and, where it is quick, with the kernels. What must be right is known from fp64 or from torch.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastformer
from fastformer.functional import (
    attention,
    attention_with_weights,
    dropout_add_layer_norm,
    layer_norm,
    linear_cross_entropy,
    packed_attention,
    rms_norm,
)
from fastformer.packing import Layout
from tests.support.all_pairs import all_pairs, name
from tests.support.closeness import gradients, random
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE, needs_kernels

# NumPy's, in the interpreter: values that are not finite are what these tests are about.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{kind} encountered") for kind in ("invalid value", "overflow")]
EPS = torch.finfo(torch.float32).eps
LENGTHS = [3, 0, 5, 3]


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_kernels)])
def any_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with fastformer.backend(request.param):
        yield request.param


def on_device(*shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    """Return a leaf of fp32 values."""
    return (scale * torch.randn(*shape) + offset).to(DEVICE).requires_grad_()


def doubles(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


def errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the largest error of each tensor, relative to its largest value."""
    return [
        ((a.double() - e).abs().max() / e.abs().max().clamp(min=1e-30)).item()
        for a, e in zip(actual, exact, strict=True)
    ]


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("fused_sum", [False, True])
def test_a_large_mean_costs_its_own_roundings_only(fused_sum: bool) -> None:
    """Mean 1e4, deviation 1: x itself is right to 1e4 eps; E[x^2] - E[x]^2 would be wrong by 1e8 eps = 12."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        if not fused_sum:
            out = layer_norm(x, 96, weight, bias)
        else:
            out = dropout_add_layer_norm(x / 2, x / 2, 96, weight, bias)[0]  # halves are exact
        return [out, *gradients(out, [x, weight, bias])]

    inputs = on_device(7, 96, offset=1e4), on_device(96), on_device(96)
    with fastformer.backend("reference"):
        exact = run(*doubles(*inputs))
    assert max(errors(run(*inputs), exact)) < 4 * 1e4 * EPS


@pytest.mark.usefixtures("any_backend")
@pytest.mark.parametrize("op", [attention, attention_with_weights])
@pytest.mark.parametrize("close", [False, True])
def test_large_scores_in_attention(close: bool, op: Callable[..., Any]) -> None:
    """Scores of 1e4 are right to 1e4 eps, and their exponentials so relatively; nothing overflows.

    Far from one another, so that one key has all the weight, and close, so that all have some.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out = op(q, k, v, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *gradients(out, [q, k, v])]

    size = 1.0 if close else 100.0
    inputs = on_device(1, 2, 9, 16, scale=size), on_device(1, 2, 9, 16, scale=size), on_device(1, 2, 9, 16)
    if close:
        with torch.no_grad():
            inputs[0][..., 0] = 210.0
            inputs[1][..., 0] = 210.0 + 0.01 * inputs[1][..., 0]
    scores = inputs[0] @ inputs[1].transpose(-1, -2) / 4
    assert scores.abs().max() > 1e4
    with fastformer.backend("reference"):
        exact = run(*doubles(*inputs))
    actual = run(*inputs)
    assert all(x.isfinite().all() for x in actual)
    compared = len(exact) if close else 1  # where one key has all the weight, gradients of scores are roundings
    assert max(errors(actual[:compared], exact[:compared])) < 16 * scores.abs().max().item() * EPS


# Ops whose output row i depends on row i of their first inputs, so many of them, and on what all rows share.
BY_ROW = {
    "layer_norm": 1,
    "rms_norm": 1,
    "dropout_add_layer_norm": 2,
    "dropout_add_rms_norm": 2,
    "feed_forward": 1,
    "rotary": 1,
}


@pytest.mark.parametrize(("op", "value"), all_pairs(BY_ROW, [math.nan, math.inf]))
def test_a_row_that_is_not_finite_changes_no_other_row(op: str, value: float, any_backend: str) -> None:
    """Bitwise: outputs and gradients of all others are those of a finite batch; this one is NaN where torch's is."""
    n, row = 6, 2
    for changed in range(BY_ROW[op]):
        inputs = leaves(op, n, DEVICE)
        dirty = [x.detach().clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            dirty[changed][row, 3] = value
        results = []
        for arguments in (inputs, dirty):
            out = tensors(CALLS[op].call(CALLS[op].extra(n, DEVICE), 0.0, *arguments))
            results.append([*out, *gradients(out, arguments[: BY_ROW[op]])])
        others = torch.arange(n, device=DEVICE) != row
        for clean, actual in zip(*results, strict=True):
            assert torch.equal(clean[others], actual[others])
        with fastformer.backend("reference"):
            plain = tensors(CALLS[op].call(CALLS[op].extra(n, DEVICE), 0.0, *dirty))
        for expected, actual in zip(plain, results[1][: len(plain)], strict=True):
            assert torch.equal(expected[row].isfinite(), actual[row].isfinite()), any_backend


@pytest.mark.slow
@pytest.mark.parametrize(("value", "causal"), [(math.nan, False), (math.inf, True)])
def test_a_packed_sequence_that_is_not_finite_changes_no_other(value: float, causal: bool, any_backend: str) -> None:
    """Each sequence in its turn, beside an empty one: the others are bitwise what they were, forward and backward.

    Its own output is not finite where v is not; of scores that are NaN torch's attention on a CPU makes 0.
    """
    layout = Layout.from_lengths(LENGTHS, DEVICE)
    clean = [on_device(sum(LENGTHS), 2, 16) for _ in range(3)]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        out = packed_attention(*inputs, layout, causal=causal)
        return [out, *gradients(out, inputs)]

    expected, start = run(clean), 0
    for length in LENGTHS:
        own = torch.zeros(sum(LENGTHS), dtype=torch.bool, device=DEVICE)
        own[start : start + length] = True
        start += length
        for dirty in ((0,), (1,), (2,), (0, 1, 2)) if any_backend == "reference" else ((0, 1, 2),):
            inputs = [x.detach().clone() for x in clean]
            for place in dirty:
                inputs[place][own] = value
            actual = run([x.requires_grad_() for x in inputs])
            for before, after in zip(expected, actual, strict=True):
                assert torch.equal(before[~own], after[~own])
            assert length == 0 or 2 not in dirty or not actual[0][own].isfinite().all()


def test_gradients_that_are_sums_of_a_million_rows() -> None:
    """Of norms' weights and of the loss's weight and bias: the error grows by the root of the rows at most."""
    rows = 1_000_000
    allowed = rows**0.5 * EPS
    with fastformer.backend("reference"):
        x, weight, bias = on_device(rows, 4, offset=1.0), on_device(4), on_device(4)
        direction = torch.rand(rows, 4, device=DEVICE)  # of one sign, so that the sum grows
        for op in (layer_norm, rms_norm):
            arguments = (weight, bias) if op is layer_norm else (weight,)
            actual = torch.autograd.grad(op(x, 4, *arguments), arguments, direction)
            wide = doubles(x, *arguments)
            exact = torch.autograd.grad(op(wide[0], 4, *wide[1:]), wide[1:], direction.double())
            assert max(errors(list(actual), list(exact))) < allowed
        target = torch.randint(3, (rows,), device=DEVICE)
        inputs = on_device(rows, 2), on_device(3, 2), on_device(3)
        loss = linear_cross_entropy(*inputs[:2], target, inputs[2], reduction="sum")
        wide = doubles(*inputs)
        losses = [
            loss,
            *(F.cross_entropy(F.linear(*arguments), target, reduction="sum") for arguments in (inputs, wide)),
        ]
        computed, plain, exact = (
            [each, *torch.autograd.grad(each, arguments[1:])]
            for each, arguments in zip(losses, (inputs, inputs, wide), strict=True)
        )
        # The weight's gradient is one matrix product over all rows, in torch too.
        for error, plain_error in zip(errors(computed, exact), errors(plain, exact), strict=True):
            assert error <= 2 * plain_error + allowed


BIAS = -0.37 * torch.arange(-59, 60).abs().expand(4, 119)
PAIRS = BIAS[0][torch.arange(60) - torch.arange(60)[:, None] + 59]


def packed_batch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    B, T = len(q), q.shape[2]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    return packed_attention(*rows, Layout.from_lengths([T] * B), **options).unflatten(0, (B, T)).transpose(1, 2)


# Each with the mask of SDPA that says the same.
SIXTEEN_BITS = {
    "dropout": (lambda q, k, v: attention(q, k, v, dropout_p=1e-9), None),
    "weights": (lambda q, k, v: attention_with_weights(q, k, v)[0], None),
    "softcap": (lambda q, k, v: attention(q, k, v, softcap=1e6), None),
    "sinks": (lambda q, k, v: attention(q, k, v, sinks=torch.full((4,), -1e4)), None),
    "distances": (lambda q, k, v: attention(q, k, v, distance_bias=BIAS), PAIRS),
    "packed": (packed_batch, None),
    "packed distances": (lambda q, k, v: packed_batch(q, k, v, distance_bias=BIAS), PAIRS),
}


@pytest.mark.parametrize(
    ("form", "scale", "autocast", "dtype"),
    # With the first scale weights are about equal, with the second a few are large.
    all_pairs(SIXTEEN_BITS, [0.2, 3.0], [False, True], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_16_bits_are_as_accurate_as_in_sdpa(form, scale, autocast, dtype):
    """At most 1.2 times the root mean square of its error, outputs and gradients."""
    inputs = [(random(3, 4, 60, 32).detach() * by).to(dtype) for by in (scale, scale, 1.0)]
    direction = torch.randn(3, 4, 60, 32).to(dtype)
    computed, mask = SIXTEEN_BITS[form]

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, None if mask is None else mask.to(torch.promote_types(q.dtype, mask.dtype))
        )

    def results(op, arguments):
        leaves = [x.to(arguments).requires_grad_() for x in inputs]
        with torch.autocast("cpu", dtype, enabled=arguments == torch.float32):
            out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))]

    exact = results(sdpa, torch.float64)
    actual, expected = (results(op, torch.float32 if autocast else dtype) for op in (computed, sdpa))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    for a, b, e in zip(actual, expected, exact, strict=True):
        assert (a - e).square().mean() <= 1.2**2 * (b - e).square().mean()


@pytest.mark.parametrize(
    ("options", "dtype", "op"),
    all_pairs(
        [{}, {"dropout_p": 1e-9}, {"softcap": 3e4}, {"bias": -40.0}],
        [torch.float16, torch.bfloat16],
        [attention, attention_with_weights],
    ),
    ids=name,
)
def test_no_score_becomes_less_than_the_lowest_mask(options, dtype, op):
    """A score of -32 and the lowest number of fp16 add up to -inf there, which would hide every key of the row."""
    v = random(1, 1, 3, 4, dtype=dtype)
    q, k = (torch.full((1, 1, 3, 4), x, dtype=dtype, requires_grad=True) for x in (4.0, -4.0))
    mask = torch.full((3, 3), torch.finfo(dtype).min, dtype=dtype)
    arguments = dict(options)
    if "bias" in arguments:
        arguments = {"distance_bias": torch.full((1, 5), arguments["bias"])}
    out = op(q, k, v, mask, **arguments)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True).expand(1, 1, 3, 4), rtol=0.02, atol=0.02)
    for grad in torch.autograd.grad(out.float().sum(), [q, k, v]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", ["dropout", "weights", "packed"])
def test_scores_beyond_the_numbers_of_fp16(form, autocast):
    """Those of 70,000 and 0: SDPA, which computes them in fp32, gives the first value."""
    q = torch.full((1, 1, 2, 4), 187.0, dtype=torch.float16, requires_grad=True)
    k = (q.detach() * torch.tensor([1.0, 0.0])[:, None]).half().requires_grad_()
    v = random(1, 1, 2, 4, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        if form == "packed":
            out = packed_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), Layout.from_lengths([2]))
            out = out.transpose(0, 1)[None]
        elif form == "weights":
            out, weights = attention_with_weights(q, k, v)
            assert weights.dtype == torch.float16
        else:
            out = attention(q, k, v, dropout_p=1e-9)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, v[:, :, :1].expand_as(out))
    for grad in torch.autograd.grad(out.float().sum(), [q, k, v]):
        assert grad.isfinite().all()
