"""Rotary positions: the frequencies that rotate the numbers of a head, and the tables that `functional.rotary` reads.

Letters: K head size, R numbers of a head that are rotated, P positions.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.host.devices import device_with_fp64
from fastformer.modes import capturing, needs_dispatcher
from fastformer.packing.layout import MOST_TOKENS
from fastformer.packing.sizes import power_of_two
from fastformer.settings import check_value

_SHORTEST = 128  # positions of the smallest table; larger ones are powers of 2
_MAX_TABLES = 64  # cached tables; none is deleted, because CUDA graphs may read them
_TABLES: dict[Any, tuple[Tensor, Tensor]] = {}


class Positions(NamedTuple):
    """The positions of tokens in their sequences: int64, broadcastable to `[..., L]`, all below `end`."""

    at: Tensor
    end: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Slower rotation of low frequencies only, for longer sequences (Llama 3.1: Grattafiori et al. 2024).

    Frequencies of at most `low` rotations within the `original` length are divided by `factor`; those of at least
    `high` rotations do not change.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        check_value("factor", self.factor, float, at_least=1)
        check_value("low", self.low, float, above=0)
        check_value("high", self.high, float, {"low": self.low}, above="low")
        check_value("original", self.original, int, at_least=1, at_most=MOST_TOKENS)

    def scale(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians a position."""
        turns = self.original * frequencies / (2 * math.pi)
        unscaled = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings of queries and keys (Su et al. 2021, equation 34).

    Attributes:
        theta: base of the frequencies, theta ** (-2 i / R).
        share: the share of the numbers of a head that are rotated (GPT-NeoX: 0.25).
        scaling: a number that divides positions (Chen et al. 2023), or `Llama3Scaling`; None: no scaling.
        interleaved: whether numbers 2 i and 2 i + 1 are a pair, as in the paper; else i and i + R / 2, as in Llama.
    """

    theta: float = 10_000.0
    share: float = 1.0
    scaling: float | Llama3Scaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_value("theta", self.theta, float, above=0)
        check_value("share", self.share, float, above=0, at_most=1)
        if not isinstance(self.scaling, Llama3Scaling):
            check_value("scaling", self.scaling, float | None, above=0)
        check_value("interleaved", self.interleaved, bool)
        slowed = self.scaling if isinstance(self.scaling, int | float) else 1.0
        if not math.isfinite(MOST_TOKENS * max(1.0, 1 / self.theta) / slowed):
            raise ValueError(f"theta and scaling must leave angles finite, not {self.theta} and {self.scaling}")

    def rotated_size(self, head_size: int) -> int:
        """Return R for a head of K numbers.

        Raises:
            ValueError: R is odd or 0.
        """
        rotated = int(head_size * self.share)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                "rotary must turn an even number of a head's numbers, "
                f"not {rotated} of {head_size} (share {self.share})"
            )
        return rotated

    def tables(self, head_size: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, `[P, R / 2]` with P of at least `length`, on the device of `like`.

        They are fp64 if `like` is, else fp32, and rounded once.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if needs_dispatcher():  # tensors created then cannot be cached, and in a trace lengths are tensors
            return self._tables(head_size, length, like.device, dtype)
        length = max(_SHORTEST, power_of_two(length))
        key = self, head_size, length, like.device, dtype
        tables = _TABLES.get(key)
        if tables is None:
            with torch.inference_mode(False), torch.no_grad():  # so that later training can use the tables
                tables = self._tables(head_size, length, like.device, dtype)
            # Captured tables lie in the graph's memory, without values before its first replay.
            if len(_TABLES) < _MAX_TABLES and not capturing(like):
                _TABLES[key] = tables
        return tables

    def _tables(self, head_size: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rotated = self.rotated_size(head_size)
        exact: dict[str, Any] = {"dtype": torch.float64, "device": device_with_fp64(device)}
        frequencies = self.theta ** -(torch.arange(0, rotated, 2, **exact) / rotated)
        if isinstance(self.scaling, Llama3Scaling):
            frequencies = self.scaling.scale(frequencies)
        elif self.scaling is not None:
            frequencies = frequencies / self.scaling
        angles = torch.outer(torch.arange(length, **exact), frequencies)
        return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
