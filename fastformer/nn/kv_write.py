"""Keys and values of one layer, and how those of new tokens are written among them.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, T of all rows, H heads, S positions,
K head size, D model width.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastformer import functional
from fastformer.functional.choice import runs_fused
from fastformer.modes import compiling
from fastformer.nn.rotary import Positions
from fastformer.packing import Layout, pack, unpack


def prefers_mask(q: Tensor) -> bool:
    """Return whether one mask for all layers keeps queries from padding, rather than lengths.

    On a CPU lengths cost a mask in every layer, and a look for what is not finite behind them, where a cache has 0.
    """
    return q.is_cpu and not compiling() and not runs_fused("attention", q)


@torch.inference_mode(False)
def length_mask(lengths: Tensor, positions: int, q: Tensor) -> Tensor:
    """Return that mask, which is added to the scores of q: `[R, 1, 1, positions]`, -inf from each length on."""
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

    @torch.inference_mode(False)
    def select(self, rows: Tensor, sentences: Tensor) -> "LayerCache":
        """Return the cache of these rows, with the memory of these sentences."""
        memory = self.memory
        if memory is not None:
            memory = memory[0].index_select(0, sentences), memory[1].index_select(0, sentences)
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), memory)


def _grown(old: Tensor, capacity: int) -> Tensor:
    # Zeros: what lies beyond the filled positions has weight 0, but 0 times what happens to be in memory may be NaN.
    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new


class KVWrite:
    """Where the keys and values of new tokens go in one step, the same for all layers.

    One of three forms: t tokens of each row behind equally long rows, `[R, t, D]` from position `start`; one token of
    each row at positions of its own, `[R, 1, D]`; or packed tokens `[T, D]`, of each row as many as a layout says.
    """

    def __init__(self, end: int, device: torch.device, start: int | None = None) -> None:
        self.end, self.device, self.start = end, device, start
        self.layout: Layout | None = None
        self.key_lengths: Tensor | None = None
        self._mask: Tensor | None = None

    @classmethod
    def ragged(cls, positions: Tensor, end: int) -> "KVWrite":
        """Write one token of each row at positions int64 `[R]`, all below `end`."""
        write = cls(end, positions.device)
        write.positions, write.key_lengths = positions, positions + 1
        write.rows = torch.arange(positions.numel(), device=positions.device)
        return write

    @classmethod
    def packed(cls, layout: Layout, past: Tensor, end: int, first: bool) -> "KVWrite":
        """Write packed tokens behind the `past` tokens of each row, int64 `[R]`.

        first: whether rows that read now have read nothing before.
        """
        write = cls(end, past.device)
        write.layout, write.first, write.counts = layout, first, layout.offsets.diff()
        write.key_lengths = past + write.counts
        rows = torch.arange(layout.batch, device=past.device)
        write.rows = rows.repeat_interleave(write.counts, output_size=layout.total)
        write.positions = past[write.rows] + layout.positions
        return write

    positions: Tensor
    rows: Tensor
    counts: Tensor
    first: bool

    @cached_property
    def index(self) -> Tensor:
        """The positions of the new tokens, broadcastable to all but the last dimension of theirs."""
        if self.start is not None:
            return torch.arange(self.start, self.end, device=self.device)
        return self.positions if self.layout is not None else self.positions[:, None]

    def write(self, kept: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values of the new tokens, `[R, t, Hkv, K]` or packed; return all, `[R, Hkv, S, K]`."""
        keys, values = kept.keys, kept.values
        if self.start is not None:
            keys[:, :, self.start : self.end] = k.transpose(1, 2)
            values[:, :, self.start : self.end] = v.transpose(1, 2)
        else:
            keys[self.rows, :, self.positions] = k if self.layout is not None else k[:, 0]
            values[self.rows, :, self.positions] = v if self.layout is not None else v[:, 0]
        return keys[:, :, : self.end], values[:, :, : self.end]

    def mask(self, q: Tensor) -> Tensor | None:
        """Return what keeps one new token a row from keys that are not of its row."""
        if self.start is not None:
            return None
        if self._mask is None or self._mask.dtype != q.dtype:
            assert self.key_lengths is not None
            self._mask = length_mask(self.key_lengths, self.end, q)
        return self._mask

    def attend(self, attention: Any, kept: LayerCache, x: Tensor) -> Any:
        """Keep the keys and values of x; attend to all that its tokens may see."""
        where = None if attention.rotary is None else Positions(self.index, self.end)
        q, k, v = attention.queries_keys_values(x, where)
        if k.dtype != kept.keys.dtype or k.shape[-2:] != kept.keys.shape[1::2]:
            H, K = kept.keys.shape[1::2]
            raise ValueError(
                f"the cache must be of this stack, its dtype and its autocast: it holds {H} heads of {K}, "
                f"{kept.keys.dtype}, not {k.shape[-2]} of {k.shape[-1]}, {k.dtype}"
            )
        keys, values = self.write(kept, k, v)
        by_distance = attention.by_distance
        if self.start is not None:
            return attention.attend(q, keys, values, causal=by_distance or self.end > self.start + 1)
        if self.layout is None:
            if by_distance or not prefers_mask(q):
                return attention.attend(q, keys, values, self.key_lengths, causal=by_distance)
            return attention.attend(q, keys, values, mask=self.mask(q))
        if self.first:
            rules = attention.rules(self.layout.max_length, q.device)
            out = functional.packed_attention(q, k, v, self.layout, causal=True, **rules)
            return attention.project_out(out.flatten(-2))
        q = unpack(q, self.layout)
        return pack(attention.attend(q, keys, values, self.key_lengths, self.counts, True), self.layout)

    def attend_to_memory(self, attention: Any, kept: LayerCache, cache: Any, x: Tensor) -> Tensor:
        """Attend to the memory of each sentence; cache: the whole cache, of all layers."""
        # The hypotheses of a sentence are its queries: the memory is kept once, not once a hypothesis.
        assert kept.memory is not None
        x = x if self.layout is None else unpack(x, self.layout)
        keys, values = kept.memory
        q = attention.queries(x.reshape(keys.shape[0], cache.hypotheses * x.shape[1], x.shape[2]))
        out = attention.attend(q, keys, values, **cache.memory_limits(q, keys.shape[2])).view(x.shape)
        return out if self.layout is None else pack(out, self.layout)
