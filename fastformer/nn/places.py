"""Keys and values of one layer, and where new tokens go among them: together, apart, or packed.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, T of all rows, H heads, S positions,
K head size, D model width.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastformer import functional
from fastformer.functional.choice import runs_fused
from fastformer.modes import compiling
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.projections import Positions
from fastformer.packing import Layout, pack, unpack

Limits = Callable[[Tensor, int], dict[str, Any]]  # of queries and S: what keeps them from the padding of memories


def hides(q: Tensor) -> bool:
    """Whether a mask that is made once for all layers is to keep queries from padding, rather than lengths.

    On a CPU lengths cost a mask in every layer, and a look for what is not finite behind them, where a cache has 0.
    """
    return q.is_cpu and not compiling() and not runs_fused("attention", q)


@torch.inference_mode(False)
def hiding(lengths: Tensor, positions: int, q: Tensor) -> Tensor:
    """Such a mask: what is added to the scores of q, `[R, 1, 1, positions]`."""
    hidden = torch.arange(positions, device=lengths.device) >= lengths[:, None]
    return q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None]


class LayerCache:
    """Keys and values of one layer: its own `[R, H, capacity, K]`; the memory's `[B, H, S, K]`, or None."""

    def __init__(self, keys: Tensor, values: Tensor, memory: tuple[Tensor, Tensor] | None) -> None:
        self.keys, self.values, self.memory = keys, values, memory

    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Have room for `capacity` positions."""
        self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def project(
        self, attention: MultiheadAttention, x: Tensor, positions: Positions | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x, such as are kept."""
        q, k, v = attention.queries_keys_values(x, positions)
        if k.dtype != self.keys.dtype or k.shape[-2:] != self.keys.shape[1::2]:
            H, K = self.keys.shape[1::2]
            raise ValueError(
                f"the cache must be of this stack, its dtype and its autocast: it holds {H} heads of {K}, "
                f"{self.keys.dtype}, not {k.shape[-2]} of {k.shape[-1]}, {k.dtype}"
            )
        return q, k, v

    @torch.inference_mode(False)
    def of(self, rows: Tensor, sentences: Tensor) -> "LayerCache":
        """Return that of these rows, and the memory of these sentences."""
        memory = self.memory
        if memory is not None:
            memory = memory[0].index_select(0, sentences), memory[1].index_select(0, sentences)
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), memory)


def _grown(old: Tensor, capacity: int) -> Tensor:
    # Zeros: what lies beyond the filled positions has weight 0, but 0 times what happens to be in memory may be NaN.
    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new


class Together:
    """New tokens `[R, t, D]`, where all rows are equally long."""

    def __init__(self, position: int, count: int, device: torch.device) -> None:
        self.position, self.end, self.device = position, position + count, device

    @cached_property
    def index(self) -> Tensor:
        """The positions of the new tokens, broadcastable to all but the last dimension of theirs."""
        return torch.arange(self.position, self.end, device=self.device)

    def project(self, attention: MultiheadAttention, kept: LayerCache, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens."""
        rotary = attention.rotary is not None
        return kept.project(attention, x, Positions(self.index, self.end) if rotary else None)

    def keep(self, kept: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the new tokens, `[R, t, Hkv, K]`; return all, `[R, Hkv, S, K]`."""
        kept.keys[:, :, self.position : self.end] = k.transpose(1, 2)
        kept.values[:, :, self.position : self.end] = v.transpose(1, 2)
        return kept.keys[:, :, : self.end], kept.values[:, :, : self.end]

    def mask(self, q: Tensor) -> Tensor | None:
        """What keeps one new token a row from keys that are not of its row."""
        return None

    def attend(self, attention: MultiheadAttention, kept: LayerCache, x: Tensor) -> Tensor:
        """Keep the keys and values of x; attend to all that its tokens may see."""
        q, k, v = self.project(attention, kept, x)  # [R, t, H, K]
        causal = self.end > self.position + 1 or attention.by_distance
        return attention.attend(q, *self.keep(kept, k, v), causal=causal)

    def attend_to_memory(
        self, attention: MultiheadAttention, hypotheses: int, limits: Limits, kept: LayerCache, x: Tensor
    ) -> Tensor:
        """Attend to the memory of each sentence, which has so many hypotheses."""
        # The hypotheses of a sentence are its queries: the memory is kept once, not once a hypothesis.
        assert kept.memory is not None
        keys, values = kept.memory
        q = attention.queries(x.reshape(keys.shape[0], hypotheses * x.shape[1], x.shape[2]))
        return attention.attend(q, keys, values, **limits(q, keys.shape[2])).view(x.shape)


class Apart(Together):
    """One new token a row, `[R, 1, D]`, at positions int64 `[R]`, all below `end`."""

    def __init__(self, positions: Tensor, end: int) -> None:
        self.positions, self.end = positions, end
        self.rows = torch.arange(positions.numel(), device=positions.device)
        self.key_lengths = positions + 1
        self._mask: Tensor | None = None

    @cached_property
    def index(self) -> Tensor:
        return self.positions[:, None]

    def keep(self, kept: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept.keys[self.rows, :, self.positions] = k[:, 0]
        kept.values[self.rows, :, self.positions] = v[:, 0]
        return kept.keys[:, :, : self.end], kept.values[:, :, : self.end]

    def mask(self, q: Tensor) -> Tensor | None:
        if self._mask is None or self._mask.dtype != q.dtype:
            self._mask = hiding(self.key_lengths, self.end, q)
        return self._mask

    def attend(self, attention: MultiheadAttention, kept: LayerCache, x: Tensor) -> Tensor:
        q, k, v = self.project(attention, kept, x)  # [R, 1, H, K]
        keys, values = self.keep(kept, k, v)
        if attention.by_distance or not hides(q):
            return attention.attend(q, keys, values, self.key_lengths, causal=attention.by_distance)
        return attention.attend(q, keys, values, mask=self.mask(q))


class Packed(Together):
    """New tokens `[T, D]`, of each row as many as a layout says, behind its `past` tokens, int64 `[R]`.

    first: whether rows that read now have read nothing before.
    """

    def __init__(self, layout: Layout, past: Tensor, end: int, first: bool) -> None:
        self.layout, self.end, self.first = layout, end, first
        self.counts = layout.offsets.diff()
        self.key_lengths = past + self.counts
        rows = torch.arange(layout.batch, device=past.device)
        self.rows = rows.repeat_interleave(self.counts, output_size=layout.total)
        self.positions = past[self.rows] + layout.positions

    @cached_property
    def index(self) -> Tensor:
        return self.positions

    def attend(self, attention: MultiheadAttention, kept: LayerCache, x: Tensor) -> Tensor:
        q, k, v = self.project(attention, kept, x)  # [T, H, K]
        kept.keys[self.rows, :, self.positions] = k
        kept.values[self.rows, :, self.positions] = v
        if self.first:
            rules = attention.rules(self.layout.max_length, q.device)
            out = functional.packed_attention(q, k, v, self.layout, causal=True, **rules)
            return attention.project_out(out.flatten(-2))
        keys, values = kept.keys[:, :, : self.end], kept.values[:, :, : self.end]
        return pack(
            attention.attend(unpack(q, self.layout), keys, values, self.key_lengths, self.counts, True), self.layout
        )

    def attend_to_memory(
        self, attention: MultiheadAttention, hypotheses: int, limits: Limits, kept: LayerCache, x: Tensor
    ) -> Tensor:
        x = unpack(x, self.layout)
        return pack(super().attend_to_memory(attention, hypotheses, limits, kept, x), self.layout)
