"""Rotary positions: which frequencies turn the numbers of a head, and the tables that `functional.rotary` reads.

A record without state, so that it may be shared, compared and written down: tables are made where they are needed.

Letters: K head size, R numbers of a head that are turned, P positions.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.modes import capturing, compiling, dispatch_modes, tracing_state, transformed
from fastformer.packing.layout import MOST_TOKENS
from fastformer.settings import check_value

_SHORTEST = 128  # tables grow by doubling from here
_WITHOUT_FP64 = "mps"  # a type of device
_MOST = 64  # tables that are kept; the oldest go
_KEPT: dict[Any, tuple[Tensor, Tensor]] = {}
_READ_BY_GRAPHS: dict[Any, tuple[Tensor, Tensor]] = {}


class Positions(NamedTuple):
    """Where tokens stand in their sequences: int64, broadcastable to `[..., L]`, all below `end`."""

    at: Tensor
    end: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Slower rotation of the slow frequencies alone, for longer sequences (Llama 3.1: Grattafiori et al. 2024).

    Wavelengths above original / low turn `factor` times as slowly, those below original / high as they were, between
    them a mixture of both.

    Attributes:
        factor: at least 1.
        low: turns within the original length, from which on a frequency is a mixture.
        high: likewise, from which on it stays; above low.
        original: the length trained with before.
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
        """Return what these frequencies, in radians a position, become."""
        turns = self.original * frequencies / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings of queries and keys (Su et al. 2021, equation 34).

    Attributes:
        theta: base of the frequencies, theta ** (-2 i / R).
        share: of the numbers of a head, how many are turned (GPT-NeoX: 0.25).
        scaling: positions are divided by a number (Chen et al. 2023), or `Llama3Scaling`; None: as they are.
        interleaved: numbers 2 i and 2 i + 1 are a pair, as in the paper; else i and i + R / 2, as in Llama.
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

    def turned(self, head_size: int) -> int:
        """R, of a head of K numbers.

        Raises:
            ValueError: it is odd, or 0.
        """
        turned = int(head_size * self.share)
        if turned < 2 or turned % 2:
            raise ValueError(
                f"rotary must turn an even number of a head's numbers, not {turned} of {head_size} (share {self.share})"
            )
        return turned

    def tables(self, head_size: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, `[P, R / 2]` with P of `length` at least, on the device of `like`.

        They are fp64 for fp64, else fp32, rounded once.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if compiling() or dispatch_modes() or transformed() or tracing_state() is not None:
            # What they make is of no use to others, and to a trace lengths are tensors.
            return self._tables(head_size, length, like.device, dtype)
        length = max(_SHORTEST, 1 << (length - 1).bit_length())
        key = self, head_size, length, like.device, dtype
        captured = capturing(like)
        kept = _KEPT.get(key)
        if kept is None:
            with torch.inference_mode(False), torch.no_grad():  # or they would be of no use to training afterwards
                kept = self._tables(head_size, length, like.device, dtype)
            if not captured:  # a graph's lie in its memory, and have values after its first replay
                while len(_KEPT) >= _MOST:
                    _KEPT.pop(next(iter(_KEPT)), None)
                _KEPT[key] = kept
        elif captured and key not in _READ_BY_GRAPHS:  # from now on the graph reads them there
            if len(_READ_BY_GRAPHS) >= _MOST:
                return self._tables(head_size, length, like.device, dtype)  # in memory of the graph
            _READ_BY_GRAPHS[key] = kept
        return kept

    def _tables(self, head_size: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turned = self.turned(head_size)
        exact = {"dtype": torch.float64, "device": "cpu" if device.type == _WITHOUT_FP64 else device}
        frequencies = self.theta ** -(torch.arange(0, turned, 2, **exact) / turned)  # type: ignore[call-overload]
        if isinstance(self.scaling, Llama3Scaling):
            frequencies = self.scaling.scale(frequencies)
        elif self.scaling is not None:
            frequencies = frequencies / self.scaling
        angles = torch.outer(torch.arange(length, **exact), frequencies)  # type: ignore[call-overload]
        return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
