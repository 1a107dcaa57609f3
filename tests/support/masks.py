"""Masks of padding and of the future, True = hidden, and their additive form."""

import math

import torch
from torch import Tensor


def right(lengths: list[int], columns: int) -> Tensor:
    """Return bool `[B, columns]`: padding on the right."""
    return torch.arange(columns) >= torch.tensor(lengths)[:, None]


def left(lengths: list[int], columns: int) -> Tensor:
    return right(lengths, columns).flip(1)


def ahead(length: int) -> Tensor:
    """Return bool `[length, length]`: keys that come after the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def minus_infinity(mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the additive mask that hides the same."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
