"""Attention in 16 bits: its error beside SDPA's, and scores that 16 bits have no numbers for, where results have.

Those are large ones, and scores under masks and softcaps.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.packing import Layout
from tests.support.all_pairs import all_pairs
from tests.support.closeness import random

BIAS = -0.37 * torch.arange(-59, 60).abs().expand(4, 119)
PAIRS = BIAS[0][torch.arange(60) - torch.arange(60)[:, None] + 59]


def packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    B, T = len(q), q.shape[2]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    return packed_attention(*rows, Layout.from_lengths([T] * B), **options).unflatten(0, (B, T)).transpose(1, 2)


# Each with the mask of SDPA that says the same.
FORMS = {
    "dropout": (lambda q, k, v: attention(q, k, v, dropout_p=1e-9), None),
    "weights": (lambda q, k, v: attention_with_weights(q, k, v)[0], None),
    "softcap": (lambda q, k, v: attention(q, k, v, softcap=1e6), None),
    "sinks": (lambda q, k, v: attention(q, k, v, sinks=torch.full((4,), -1e4)), None),
    "distances": (lambda q, k, v: attention(q, k, v, distance_bias=BIAS), PAIRS),
    "packed": (packed, None),
    "packed distances": (lambda q, k, v: packed(q, k, v, distance_bias=BIAS), PAIRS),
}


@pytest.mark.parametrize(
    ("form", "scale", "autocast", "dtype"),
    # With the first scale weights are about equal, with the second a few are large.
    all_pairs(FORMS, [0.2, 3.0], [False, True], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_16_bits_are_as_accurate_as_in_sdpa(form, scale, autocast, dtype):
    """At most 1.2 times the root mean square of its error, outputs and gradients."""
    inputs = [(random(3, 4, 60, 32).detach() * by).to(dtype) for by in (scale, scale, 1.0)]
    direction = torch.randn(3, 4, 60, 32).to(dtype)
    ours, mask = FORMS[form]

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, None if mask is None else mask.to(torch.promote_types(q.dtype, mask.dtype))
        )

    def results(op, given):
        leaves = [x.to(given).requires_grad_() for x in inputs]
        with torch.autocast("cpu", dtype, enabled=given == torch.float32):
            out = op(*leaves)
        return [out, *torch.autograd.grad(out, leaves, direction.to(out.dtype))]

    exact = results(sdpa, torch.float64)
    found, expected = (results(op, torch.float32 if autocast else dtype) for op in (ours, sdpa))
    for a, b, e in zip(found, expected, exact, strict=True):
        assert (a - e).square().mean() <= 1.2**2 * (b - e).square().mean()


@pytest.mark.parametrize(
    ("options", "dtype", "op"),
    all_pairs(
        [{}, {"dropout_p": 1e-9}, {"softcap": 3e4}, {"bias": -40.0}],
        [torch.float16, torch.bfloat16],
        [attention, attention_with_weights],
    ),
    ids=str,
)
def test_no_score_becomes_less_than_the_lowest_mask(options, dtype, op):
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
