"""Large means and logits, denormals, infinities, NaN, a million rows, very short and very long sequences.

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
from tests.support.closeness import gradients
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
    """fp32 values of which fp64 has exact copies, a leaf."""
    return (scale * torch.randn(*shape) + offset).to(DEVICE).requires_grad_()


def doubles(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest error of each, against its largest value."""
    return [
        ((a.double() - e).abs().max() / e.abs().max().clamp(min=1e-30)).item()
        for a, e in zip(found, exact, strict=True)
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
    found = run(*inputs)
    assert all(x.isfinite().all() for x in found)
    compared = len(exact) if close else 1  # where one key has all the weight, gradients of scores are roundings
    assert max(errors(found[:compared], exact[:compared])) < 16 * scores.abs().max().item() * EPS


# Ops whose output row i depends on row i of their first inputs, so many of them, and on what all rows share.
BY_ROW = {
    "layer_norm": 1,
    "rms_norm": 1,
    "dropout_add_layer_norm": 2,
    "dropout_add_rms_norm": 2,
    "feed_forward": 1,
    "rotary": 1,
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", BY_ROW)
def test_a_row_that_is_not_finite_changes_no_other_row(op: str, value: float, any_backend: str) -> None:
    """Bitwise: outputs and gradients of all others are those of a finite batch; this one is NaN where torch's is."""
    n, row = 6, 2
    for changed in range(BY_ROW[op]):
        inputs = leaves(op, n, DEVICE)
        dirty = [x.detach().clone().requires_grad_() for x in inputs]
        with torch.no_grad():
            dirty[changed][row, 3] = value
        results = []
        for given in (inputs, dirty):
            out = tensors(CALLS[op].call(CALLS[op].extra(n, DEVICE), 0.0, *given))
            results.append([*out, *gradients(out, given[: BY_ROW[op]])])
        others = torch.arange(n, device=DEVICE) != row
        for clean, found in zip(*results, strict=True):
            assert torch.equal(clean[others], found[others])
        with fastformer.backend("reference"):
            plain = tensors(CALLS[op].call(CALLS[op].extra(n, DEVICE), 0.0, *dirty))
        for expected, found in zip(plain, results[1][: len(plain)], strict=True):
            assert torch.equal(expected[row].isfinite(), found[row].isfinite()), any_backend


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("causal", [False, True])
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
            found = run([x.requires_grad_() for x in inputs])
            for before, after in zip(expected, found, strict=True):
                assert torch.equal(before[~own], after[~own])
            assert length == 0 or 2 not in dirty or not found[0][own].isfinite().all()


def test_gradients_that_are_sums_of_a_million_rows() -> None:
    """Of norms' weights and of the loss's weight and bias: the error grows by the root of the rows at most."""
    rows = 1_000_000
    allowed = rows**0.5 * EPS
    with fastformer.backend("reference"):
        x, weight, bias = on_device(rows, 4, offset=1.0), on_device(4), on_device(4)
        direction = torch.rand(rows, 4, device=DEVICE)  # of one sign, so that the sum grows
        for op in (layer_norm, rms_norm):
            given = (weight, bias) if op is layer_norm else (weight,)
            found = torch.autograd.grad(op(x, 4, *given), given, direction)
            wide = doubles(x, *given)
            exact = torch.autograd.grad(op(wide[0], 4, *wide[1:]), wide[1:], direction.double())
            assert max(errors(list(found), list(exact))) < allowed
        target = torch.randint(3, (rows,), device=DEVICE)
        inputs = on_device(rows, 2), on_device(3, 2), on_device(3)
        loss = linear_cross_entropy(*inputs[:2], target, inputs[2], reduction="sum")
        wide = doubles(*inputs)
        losses = [loss, *(F.cross_entropy(F.linear(*given), target, reduction="sum") for given in (inputs, wide))]
        ours, plain, exact = (
            [each, *torch.autograd.grad(each, given[1:])]
            for each, given in zip(losses, (inputs, inputs, wide), strict=True)
        )
        # The weight's gradient is one matrix product over all rows, in torch too.
        for error, plain_error in zip(errors(ours, exact), errors(plain, exact), strict=True):
            assert error <= 2 * plain_error + allowed
