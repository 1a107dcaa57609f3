"""distance_bias and sinks in the attention kernels: output and every gradient, against fp64 of the same inputs."""

import math

import pytest
import torch
from torch import Tensor

import fastformer
from fastformer.functional import attention, attention_with_weights, packed_attention
from fastformer.functional.attention import fused as fused_attention
from fastformer.packing import Layout
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
@pytest.mark.parametrize("weights", [False, True])
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
