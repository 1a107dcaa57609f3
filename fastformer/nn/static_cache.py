"""A cache of fixed capacity, whose steps read lengths from tensors, so that a CUDA graph can replay them.

Keys and values are written at positions from a tensor. Attention reads the whole capacity and gets the filled lengths
as a tensor. The kernels skip unfilled positions. Plain PyTorch computes them with weight 0, so on a CPU this costs more
than `KVCache`.
"""

import torch
from torch import Tensor, nn

from fastformer.modes import readable
from fastformer.nn.cache import KVCache
from fastformer.nn.kv_write import KVWrite
from fastformer.packing import Layout
from fastformer.settings import check_value


class StaticKVCache(KVCache):
    """Keys and values for R rows of at most `capacity` tokens.

    A step of one token a row runs the same operations on the same tensors each time, so a CUDA graph can capture it.
    Other steps, `reorder`, `keep`, `crop` and `grow` cannot be captured; `keep` and `grow` replace the tensors.

    Attributes:
        lengths: int64 `[R]`, on the device; replayed graphs update it.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        stack: nn.Module,
        rows: int,
        memory: tuple[Tensor, Layout] | None = None,
        hypotheses: int = 1,
        capacity: int = 1,
    ) -> None:
        check_value("capacity", capacity, int, at_least=1)
        super().__init__(stack, rows, memory, hypotheses)
        self.grow(capacity)
        self.lengths = self.lengths.to(self.device)
        self._empty = True  # no row has read anything

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens a row; replaces the tensors."""
        check_value("capacity", capacity, int, {"of before": self.capacity}, at_least="of before")
        for layer_cache in self.layers:
            layer_cache.grow(capacity)
        self.capacity = capacity

    def write(self, count: int, layout: Layout | None) -> KVWrite:
        if readable(self.lengths):
            end = self.lengths.max() + count if layout is None else (self.lengths + layout.lengths).max()
            if end > self.capacity:
                raise ValueError(f"capacity must be at least the {int(end)} tokens of a row, not {self.capacity}")
        if layout is None:
            return KVWrite.ragged(self.lengths, self.capacity)
        return KVWrite.packed(layout, self.lengths, self.capacity, self._empty)

    def advance(self, count: int, layout: Layout | None) -> None:
        self.lengths.add_(count if layout is None else layout.offsets.diff())
        self._empty = False

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths.copy_(lengths)

    def _reads_uniformly(self, count: int) -> bool:
        return count == 1

    def _filled(self) -> int:
        return self.capacity


def make_cache(
    stack: nn.Module,
    rows: int,
    memory: tuple[Tensor, Layout] | None,
    hypotheses: int,
    longest: int | None,
    capacity: int | None,
) -> KVCache:
    """Make a cache that grows, or one of fixed capacity; arguments as of the stacks' `new_cache`."""
    if capacity is None:
        return KVCache(stack, rows, memory, hypotheses, longest)
    if longest is not None:
        raise ValueError(f"longest must be None with capacity, which limits the tokens of a row, not {longest}")
    return StaticKVCache(stack, rows, memory, hypotheses, capacity)
