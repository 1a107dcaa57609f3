"""Keys and values of one layer, and how new keys and values are written into the cache.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, T packed new tokens, H heads,
S positions, K head size, D model width.
"""

import math
from dataclasses import dataclass
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
    """Return whether one mask hides padding in all layers; on a CPU, lengths cost a mask in every layer."""
    return q.is_cpu and not compiling() and not runs_fused("attention", q)


@torch.inference_mode(False)
def length_mask(lengths: Tensor, positions: int, q: Tensor) -> Tensor:
    """Return the mask that is added to the scores of q: `[R, 1, 1, positions]`, -inf from each length on."""
    hidden = torch.arange(positions, device=lengths.device) >= lengths[:, None]
    return q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None, None]


@dataclass
class LayerCache:
    """Keys and values of one layer: of read tokens `[R, H, capacity, K]`; of the memory `[B, H, S, K]`, or None."""

    keys: Tensor
    values: Tensor
    memory: tuple[Tensor, Tensor] | None

    @torch.inference_mode(False)
    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` positions; the new ones are 0, because 0 times NaN is NaN."""
        grown = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (self.keys, self.values)]
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :, : old.shape[2]] = old
        self.keys, self.values = grown

    def select(self, rows: Tensor, sentences: Tensor) -> "LayerCache":
        """Return the cache of these rows, with the memory of these sentences."""
        memory = None if self.memory is None else tuple(x.index_select(0, sentences) for x in self.memory)
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), memory)  # type: ignore[arg-type]


class KVWrite:
    """How the keys and values of new tokens are written in one step, the same for all layers.

    One of three forms: t tokens of each row, `[R, t, D]`, if rows are equally long; one token of each row, `[R, 1, D]`;
    or packed tokens `[T, D]` with a layout.

    Args:
        end: all positions are below it.
        past: how many tokens each row has read, int64 `[R]` on the device of the cache; a number if rows are equally
            long.
        device: of the cache.
        layout: of packed tokens.
        first: whether all rows with new packed tokens are empty so far.
    """

    def __init__(
        self,
        end: int,
        past: int | Tensor,
        device: torch.device,
        layout: Layout | None = None,
        first: bool = False,
    ) -> None:
        self.end, self.device, self.layout, self.first = end, device, layout, first
        self.start = past if isinstance(past, int) else None
        self._mask: Tensor | None = None
        if not isinstance(past, Tensor):
            return
        self.rows = torch.arange(past.numel(), device=device)
        self.positions = past
        if layout is None:
            self.key_lengths = past + 1
        else:
            self.counts = layout.offsets.diff()
            self.key_lengths = past + self.counts
            self.rows = self.rows.repeat_interleave(self.counts, output_size=layout.total)
            self.positions = past[self.rows] + layout.positions

    @cached_property
    def index(self) -> Tensor:
        """The positions of the new tokens, broadcastable to the tokens without the last dimension."""
        if self.start is not None:
            return torch.arange(self.start, self.end, device=self.device)
        return self.positions if self.layout is not None else self.positions[:, None]

    def write(self, layer_cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of the new tokens, `[R, t, Hkv, K]` or packed; return all, `[R, Hkv, S, K]`."""
        keys, values = layer_cache.keys, layer_cache.values
        for cached, new in ((keys, k), (values, v)):
            if self.start is not None:
                cached[:, :, self.start : self.end] = new.transpose(1, 2)
            else:
                cached[self.rows, :, self.positions] = new if self.layout is not None else new[:, 0]
        return keys[:, :, : self.end], values[:, :, : self.end]

    def mask(self, q: Tensor) -> Tensor | None:
        """Return the mask that hides unfilled positions from one new token a row; None if rows are equally long."""
        if self.start is not None:
            return None
        if self._mask is None or self._mask.dtype != q.dtype:
            self._mask = length_mask(self.key_lengths, self.end, q)
        return self._mask

    def attend(self, attention: Any, layer_cache: LayerCache, x: Tensor) -> Any:
        """Write the keys and values of x; attend to all positions that the tokens may see."""
        positions = None if attention.rotary is None else Positions(self.index, self.end)
        q, k, v = attention.project(x, x, x, positions, positions)
        if k.dtype != layer_cache.keys.dtype or k.shape[-2:] != layer_cache.keys.shape[1::2]:
            H, K = layer_cache.keys.shape[1::2]
            raise ValueError(
                f"the cache must be of this stack, its dtype and its autocast: it holds {H} heads of {K}, "
                f"{layer_cache.keys.dtype}, not {k.shape[-2]} of {k.shape[-1]}, {k.dtype}"
            )
        keys, values = self.write(layer_cache, k, v)
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

    def attend_to_memory(self, attention: Any, layer_cache: LayerCache, cache: Any, x: Tensor) -> Tensor:
        """Attend to the memory of each sentence; cache: the whole cache, of all layers."""
        # The hypotheses of a sentence are queries of one batch row, so the memory is stored once a sentence.
        assert layer_cache.memory is not None
        x = x if self.layout is None else unpack(x, self.layout)
        keys, values = layer_cache.memory
        q, _, _ = attention.project(x.reshape(keys.shape[0], cache.hypotheses * x.shape[1], x.shape[2]), None, None)
        out = attention.attend(q, keys, values, **cache.memory_limits(q, keys.shape[2])).view(x.shape)
        return out if self.layout is None else pack(out, self.layout)
