"""Scores that 16 bits have no numbers for, where results have: large ones, and those under masks and softcaps."""

import pytest
import torch

from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.packing import Layout
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("least", [-60_000.0, -65_504.0])
def test_packed_with_a_bias_that_leaves_scores_no_digits(dtype, least):
    """What is added to all scores of a row changes nothing; short sequences have products, softmax and no SDPA."""
    q, k, v = (random(5, 2, 8, dtype=dtype) * scale for scale in (4.0, 4.0, 1.0))
    layout, bias = Layout.from_lengths([3, 2]), torch.full((2, 5), least)
    found, expected = (packed_attention(q, k, v, layout, distance_bias=its) for its in (bias, None))
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.05)
