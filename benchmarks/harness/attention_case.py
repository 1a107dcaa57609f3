"""A case of self-attention: its tensors, masks and lengths, its least work, and its results in fp64.

Tensors are `[B, H, L, D]` as projections leave them, D next to H in memory; padding is on the right.

Letters: B batch, H heads, L positions, D head size; n heads that are compared with fp64, of all B * H.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.clock import Work
from benchmarks.harness.lengths import Lengths, multi30k_lengths, uniform_lengths
from benchmarks.harness.race import Direction, Race
from fastformer.packing import Layout

_COMPARED_SCORES = 1 << 26  # of all heads that are compared with fp64, 0.5 GiB; autograd keeps a few such tensors
# Of matrix products, for each pair and channel of keys, and of values: q k^T, p v; q k^T, ds k, ds^T q, do v^T, p^T do.
_OPERATIONS = {"forward": (2, 2), "backward": (6, 4), "both": (8, 6)}
_TENSORS = {"forward": 2, "backward": 4, "both": 6}  # q k, v o; q k dq dk, v o do dv
_TINY = {"batch": 3, "heads": 2, "length": 9, "head_size": 16, "share": 0.3}


@dataclass(frozen=True)
class AttentionShape:
    """B x H x L of head size D."""

    batch: int
    heads: int
    length: int
    head_size: int = 64
    causal: bool = True
    kind: str | None = None  # of lengths; None: all are L
    share: float = 0.45  # of padding
    value_size: int | None = None  # D if None

    @property
    def name(self) -> str:
        parts = [f"{self.batch}x{self.heads}x{self.length}", f"d{self.head_size}"]
        parts += [] if self.value_size is None else [f"v{self.value_size}"]
        parts += [] if self.kind is None else [f"{self.share:.0%}-{self.kind}"]
        return "-".join([*parts, "causal" if self.causal else "not_causal"])

    def lengths(self) -> Lengths:
        if self.kind is None:
            return np.full(self.batch, self.length)
        if self.kind == "multi30k":
            return multi30k_lengths(self.batch)
        if self.kind == "empty":
            return np.append(uniform_lengths(self.batch - 1, self.length, self.share), 0)
        return uniform_lengths(self.batch, self.length, self.share)


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """Self-attention of B sequences, of H heads of D channels."""

    lengths: Lengths
    heads: int
    head_size: int
    device: torch.device
    causal: bool = True
    padded: bool = True  # whether lengths are given to the ops
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0  # of the weights
    value_size: int | None = None  # channels of values; D if None
    tf32: bool = False  # fp32 tensors, whose products are rounded to tf32
    alibi: bool = False  # scores fall with the distance of key from query (Press et al. 2022)

    @property
    def channels_of_values(self) -> int:
        return self.value_size or self.head_size

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        return int(self.lengths.max())

    @property
    def pairs(self) -> int:
        """Number of (query, key) of real positions where the query may attend to the key, in all heads."""
        n = self.lengths.astype(np.int64)
        return self.heads * int((n * (n + 1) // 2 if self.causal else n * n).sum())

    def work(self, direction: Direction) -> Work:
        """Return the least work for real positions; backward computes the scores again."""
        D, V = self.head_size, self.channels_of_values
        elements = self.heads * (D + V) * int(self.lengths.sum())
        of_keys, of_values = _OPERATIONS[direction]
        return Work((of_keys * D + of_values * V) * self.pairs, _TENSORS[direction] * elements * self.dtype.itemsize)

    @cached_property
    def lengths_on_device(self) -> Tensor:
        return torch.from_numpy(self.lengths).to(self.device)

    @cached_property
    def layout(self) -> Layout:
        return Layout.from_lengths(torch.from_numpy(self.lengths), self.device)

    @cached_property
    def real(self) -> Tensor:
        """Bool `[B, L]`."""
        return torch.arange(self.length, device=self.device) < self.lengths_on_device[:, None]

    @cached_property
    def look_ahead(self) -> Tensor:
        """Bool `[L, L]`: True where causality forbids."""
        return torch.ones(self.length, self.length, dtype=torch.bool, device=self.device).triu(1)

    @cached_property
    def distance_bias(self) -> Tensor:
        """ALiBi, fp32 `[H, 2 * L - 1]`, by key's position less query's: -distance / 2^(8 h / H), h from 1 to H."""
        distances = torch.arange(1 - self.length, self.length, device=self.device).abs()
        return -distances * 2.0 ** (torch.arange(1, self.heads + 1, device=self.device) * (-8 / self.heads))[:, None]

    def dense_bias(self) -> Tensor:
        """Return `distance_bias` as `[H, L, L]`."""
        return self.distance_bias.unfold(1, self.length, 1).flip(1)

    def allowed(self) -> Tensor:
        """Return the mask, True = may attend: bool `[B, 1, L, L]` if causal, else `[B, 1, 1, L]`."""
        keys = self.real[:, None, None, :]
        return keys & ~self.look_ahead if self.causal else keys

    def random(self) -> Tensor:
        """Return random normal numbers of the output's shape, 0 at padding."""
        shape = self.batch, self.length, self.heads, self.channels_of_values
        x = torch.randn(shape, device=self.device).to(self.dtype)
        return (x * self.real[:, :, None, None]).transpose(1, 2)

    def leaves(self) -> list[Tensor]:
        """Return q, k and v, with random numbers at padding too."""
        shape, sizes = (self.batch, self.length, self.heads), (self.head_size, self.head_size, self.channels_of_values)
        tensors = [torch.randn(*shape, size, device=self.device).to(self.dtype) for size in sizes]
        return [x.transpose(1, 2).requires_grad_() for x in tensors]

    @cached_property
    def compared_heads(self) -> tuple[Tensor, Tensor]:
        """Rows and heads that are compared with fp64: all, or some from the first of the first row to the last."""
        number = max(2, _COMPARED_SCORES // max(1, self.length**2))
        of = self.batch * self.heads
        picked = torch.linspace(0, of - 1, min(number, of), dtype=torch.float64).round().long()
        return picked // self.heads, picked % self.heads

    def compared(self, x: Tensor) -> Tensor:
        """Return the heads that are compared, `[B, H, L, D]` -> `[n, L, D]`."""
        return x[self.compared_heads]

    def expected(self, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
        """Return output and gradients of q, k and v in fp64, of the heads that are compared."""
        results = []
        for heads, q, k, v, dout in self._chunks([*inputs, upstream]):
            wide = [x.requires_grad_() for x in (q, k, v)]
            out = self._weights(heads, q, k) @ v
            results.append([out.detach(), *torch.autograd.grad(out, wide, dout)])
        return [torch.cat(x) for x in zip(*results, strict=True)]

    def dropped(self, inputs: list[Tensor]) -> Tensor:
        """Return the mean square of dropout's change of an output, p / (1 - p) sum_s (weight_ts v_s)^2, `[n, L, D]`."""
        squares = [self._weights(heads, q, k).square() @ v.square() for heads, q, k, v in self._chunks(inputs)]
        return torch.cat(squares) * (self.dropout / (1 - self.dropout))

    def _chunks(self, tensors: list[Tensor]) -> Iterator[Any]:
        """Yield some of the heads that are compared, as rows and heads, and the tensors of these in fp64."""
        size = max(1, 4 * _COMPARED_SCORES // max(1, self.length**2))
        for chunk in zip(*(x.split(size) for x in self.compared_heads), strict=True):  # type: ignore[no-untyped-call]
            yield chunk, *(x.detach()[chunk].double() for x in tensors)

    def _weights(self, chunk: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> Tensor:
        rows, heads = chunk
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head_size)
        if self.alibi:
            scores = scores + self.dense_bias()[heads]
        # Finite, so that a row without a key gives no NaN; nothing of it is compared.
        forbidden = ~self.real[rows][:, None, :]
        return scores.masked_fill(forbidden | self.look_ahead if self.causal else forbidden, -1e300).softmax(-1)


def attention_case(
    race: Race, shape: AttentionShape, dtype: torch.dtype = torch.bfloat16, dropout: float = 0.0
) -> AttentionCase:
    """Return the case of a shape, the same for calls in a row; in a dry run a tiny one, on a CPU in fp32."""
    if race.device.type == "cpu":
        dtype = torch.float32  # Triton's interpreter multiplies matrices of bf16 as if they were integers
    if race.tiny:
        shape = replace(shape, **_TINY, value_size=shape.value_size and 24)  # type: ignore[arg-type]
    return _new_case(shape, race.device, dtype, dropout)


@lru_cache(maxsize=1)
def _new_case(shape: AttentionShape, device: torch.device, dtype: torch.dtype, dropout: float) -> AttentionCase:
    sizes = {"padded": shape.kind is not None, "value_size": shape.value_size, "dtype": dtype, "dropout": dropout}
    return AttentionCase(shape.lengths(), shape.heads, shape.head_size, device, shape.causal, **sizes)  # type: ignore[arg-type]


def case_name(op: str, shape: AttentionShape, p: AttentionCase) -> str:
    """Return a name in which cases that differ in length, padding or head size differ in that alone."""
    parts = [f"{op}, {p.batch * p.length:,} positions, length {p.length:,}, {p.heads} heads of {p.head_size}"]
    parts += [] if p.value_size is None else [f"values of {p.value_size}"]
    parts += ["causal" if p.causal else "not causal"]
    share = 1 - float(p.lengths.mean()) / p.length
    parts += [] if shape.kind is None else [f"padding {100 * share:.0f} %, {shape.kind} lengths"]
    parts += ["tf32" if p.tf32 else "fp32"] if p.dtype == torch.float32 else []
    parts += [f"dropout {p.dropout}"] if p.dropout else []
    return ", ".join(parts)
