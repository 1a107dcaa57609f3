"""The dropout that all ops share."""

import math

import pytest
import torch

from fastformer.functional.dropout import drop as dropout
from tests.support.closeness import random


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_rate_is_binomial_and_the_scale_unbiased(p, dtype):
    n = 200_003  # no multiple of the four decisions in one random number
    out = dropout(torch.ones(n, dtype=dtype), p)
    kept = int((out != 0).sum())
    assert abs(kept - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    assert out.unique().numel() == 2
    # p is quantised to 2^-16.
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=max(2**-16 / (1 - p), torch.finfo(dtype).eps))


def test_decisions_are_independent():
    """Of neighbours, of elements one random number apart, and of the same element in the next call."""
    n = 1 << 17
    keep = (dropout(torch.ones(n), 0.5) != 0).double() - 0.5
    following = (dropout(torch.ones(n), 0.5) != 0).double() - 0.5
    for other in (*(keep.roll(shift) for shift in (1, 2, 3, 4)), following):
        assert abs((keep * other).mean().item()) < 5 * 0.25 / math.sqrt(n)


def test_dropout_repeats_under_a_seed_and_takes_0_and_1():
    x = random(7, 5)
    torch.manual_seed(1)
    first = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(dropout(x, 0.5), first)
    assert torch.equal(dropout(x, 0.0), x)
    assert not dropout(x, 1.0).any()
    assert dropout(x[:0], 0.5).shape == (0, 5)
    assert dropout(x.mT, 0.5).shape == (5, 7)
