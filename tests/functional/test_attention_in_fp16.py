"""Scores that fp16 has no numbers for, where what is asked for has: under its lowest mask, and under wide softcaps."""

import pytest
import torch

from fastformer.functional import attention, attention_with_weights
from tests.support.closeness import random


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"dropout_p": 1e-9}, {"softcap": 3e4}, {"bias": -40.0}], ids=str)
@pytest.mark.parametrize("op", [attention, attention_with_weights])
def test_no_score_becomes_less_than_the_lowest_mask(op, dtype, options):
    """A score of -32 and the lowest number of fp16 add up to -inf there, which would hide every key of the row."""
    v = random(1, 1, 3, 4, dtype=dtype)
    q, k = (torch.full((1, 1, 3, 4), x, dtype=dtype, requires_grad=True) for x in (4.0, -4.0))
    mask = torch.full((3, 3), torch.finfo(dtype).min, dtype=dtype)
    given = dict(options)
    if "bias" in given:
        given = {"distance_bias": torch.full((1, 5), given["bias"])}
    out = op(q, k, v, mask, **given)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True).expand(1, 1, 3, 4), rtol=0.02, atol=0.02)
    for grad in torch.autograd.grad(out.float().sum(), [q, k, v]):
        assert grad.isfinite().all()


def test_a_softcap_that_caps_nothing():
    """Scores are divided by it, and gradients multiplied: beyond fp16's numbers, both ways."""
    inputs = [random(1, 2, 5, 8, dtype=torch.float16) for _ in range(3)]
    results = []
    for softcap in (None, 1e8):
        out = attention(*inputs, softcap=softcap)
        results.append([out, *torch.autograd.grad(4 * out.float().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
