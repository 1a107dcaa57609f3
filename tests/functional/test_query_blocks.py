"""Attention in blocks of queries is attention: whatever the rules, and without a tensor of all scores."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.functional import attention, packed_attention
from fastformer.functional.attention import query_blocks, reference
from fastformer.packing import Layout
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE


@pytest.fixture(autouse=True)
def _reference():
    with fastformer.backend("reference"):
        yield


def drawn(random: Random) -> tuple[list[Tensor], dict[str, Any]]:
    """A problem in fp64 with any of the rules."""
    B, H, T, S = 2, 2, random.randint(1, 13), random.randint(1, 13)
    masks = (
        torch.rand(T, S) < 0.7,
        torch.randn(1, H, T, S, dtype=torch.float64),
        torch.rand(B, 1, 1, S) < 0.6,
        torch.rand(T, 1) < 0.6,
    )
    options: dict[str, Any] = {
        "causal": True,
        "window": (random.choice((None, 0, 1, 3, 20)), random.choice((None, 0, 1, 2))),
        "alignment": "bottom_right",
        "query_lengths": torch.randint(T + 1, (B,)),
        "key_lengths": torch.randint(S + 1, (B,)),
        "key_mask": torch.rand(B, S) < 0.7,
        "mask": random.choice(masks),
        "softcap": 2.0,
        "distance_bias": torch.randn(H, 2 * random.randint(max(T, S), 15) - 1, dtype=torch.float64).requires_grad_(),
        "sinks": torch.randn(H, dtype=torch.float64).requires_grad_(),
    }
    given = {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value
        for name, value in options.items()
        if random.random() < 0.4
    }
    inputs = [torch.randn(B, H, n, 4, dtype=torch.float64).to(DEVICE).requires_grad_() for n in (T, S, S)]
    return inputs + [given[name] for name in ("distance_bias", "sinks") if name in given], given


def small(patch: pytest.MonkeyPatch, block: int, rows: int) -> None:
    patch.setattr(query_blocks, "_LARGEST", 0)
    patch.setattr(query_blocks, "_BLOCK", block)
    patch.setattr(query_blocks, "_ROWS", rows)


def test_any_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        random = Random(seed)
        torch.manual_seed(seed)
        inputs, given = drawn(random)
        results = []
        for blocks in (False, True):
            with monkeypatch.context() as patch:
                if blocks:
                    small(patch, 4 * inputs[1].shape[2] * random.choice((1, 2, 5)), random.choice((1, 2, 4)))
                out = attention(*inputs[:3], **given)
                results.append([out, *gradients(out, inputs)])
        for whole, found in zip(*results, strict=True):
            torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-12, msg=f"{seed}: {given}")


def test_an_additive_mask_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 6, 2)
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: attention(*x[:3], x[3], causal=True), (q, k, v, mask))


def test_dropout_is_the_same_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is linear in the values: <out, d> = <v, dv> for the mask that was drawn, and for no other."""
    small(monkeypatch, 40, 3)
    q, k, v = (torch.randn(1, 2, 20, 8, device=DEVICE, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, causal=True, dropout_p=0.4)
    direction = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, direction)
    torch.testing.assert_close((out * direction).sum(), (v * dv).sum())


def test_no_blocks_where_they_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of keys is small, SDPA knows causality, and the transforms of torch.func take no checkpoints."""
    small(monkeypatch, 1, 1)

    def refuse(*arguments: object) -> None:
        raise AssertionError("blocks")

    monkeypatch.setattr(reference, "attend_in_blocks", refuse)
    q, k, v = (torch.randn(2, 1, 6, 4, device=DEVICE) for _ in range(3))
    attention(q, k, v, causal=True)
    attention(q, k, v, key_lengths=torch.tensor([3, 6]))
    attention(q, k, v, torch.ones(2, 1, 1, 6, device=DEVICE, dtype=torch.bool))
    packed_attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), Layout.from_lengths([6]))
    torch.func.grad(lambda x: attention(x, k, v, causal=True, window=(2, 0)).sum())(q)
    with pytest.raises(AssertionError, match="blocks"):
        attention(q, k, v, causal=True, window=(2, 0))
    with pytest.raises(AssertionError, match="blocks"):
        attention(q, k, v, distance_bias=torch.zeros(1, 11, device=DEVICE))
