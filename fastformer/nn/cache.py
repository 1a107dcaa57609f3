"""Key and value caches of decoders: `cache = decoder.new_cache(memory)`, then `decoder.step(x, cache)`.

A step reads one token a row, a chunk, or prompts of different lengths. Tensors of a cache are created outside inference
mode, so that steps inside and outside of it can use the same cache.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, T packed new tokens, H heads,
S positions, K head size, D model width.
"""

import copy
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.host.devices import check_tensors, send
from fastformer.modes import readable
from fastformer.nn.inspection import check_layerwise
from fastformer.nn.kv_write import KVWrite, LayerCache, length_mask, prefers_mask
from fastformer.nn.rotary import Positions
from fastformer.packing import Layout, lengths_of, pack, unpack
from fastformer.settings import check_value

_FIRST_CAPACITY = 32


def without_gaps(layout: Layout, device: torch.device) -> Layout:
    """Return the layout of the same sequences, each beginning at column 0, as a cache stores them."""
    return layout if layout.slots is layout.origin else Layout.from_lengths(layout.lengths, device)


class KVCache:
    """Keys and values of all layers of a stack, for R rows; created by its `new_cache` and filled by its `step`.

    Attributes:
        lengths: int64 `[R]`, on the CPU: how many tokens each row has read. Read-only.
        hypotheses: N, the number of rows that share a sentence's memory.
        longest: the most tokens that a row may read; None: no limit.
        memory_lengths: int64 `[B]`, on the device; None if all memories are equally long, or there is no memory.
        layers: a `LayerCache` for each layer.
        stack_id: identifies the stack that created the cache; copies made of the stack afterwards share it.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        stack: nn.Module,
        rows: int,
        memory: tuple[Tensor, Layout] | None = None,
        hypotheses: int = 1,
        longest: int | None = None,
    ) -> None:
        check_value("rows", rows, int, at_least=0)
        check_value("hypotheses", hypotheses, int, at_least=1)
        check_value("longest", longest, int | None, at_least=1)
        inspection = check_layerwise(stack, "decoding with a cache")
        if inspection.mixing is not None:
            declare = "if it treats each token alone, declare it with fastformer.token_wise"
            raise RuntimeError(f"{inspection.mixing}: it may look at several positions, and a step has one; {declare}")
        if "multihead_attn" in inspection.position_dependent:
            raise RuntimeError("attention to the memory must not count positions: a step does not know them")
        state: dict[str, Any] = stack.__dict__
        self.stack_id: str = state.setdefault("_stack_id", uuid.uuid4().hex)
        self.hypotheses, self.longest, self.capacity = hypotheses, longest, 0
        self.batch_first = inspection.batch_first is not False
        self.memory_lengths: Tensor | None = None
        self._memory_mask: tuple[Tensor, Tensor] | None = None  # lengths, and the mask of them
        self.layers: list[LayerCache] = []
        for layer in stack.layers:  # type: ignore[union-attr]
            attention: Any = layer.self_attn
            # Projecting no tokens gives the dtype under autocast, the heads and the head size.
            weight = attention.in_proj_weight if attention._qkv_same_embed_dim else attention.q_proj_weight
            no_tokens = weight.new_zeros(0, attention.embed_dim)
            at = Positions(no_tokens.new_empty(0, dtype=torch.int64), 1)
            _, *empty = attention.project(None, no_tokens, no_tokens, None, at)
            keys, values = (x.new_zeros(rows, x.shape[1], 0, x.shape[2]) for x in empty)
            cross: Any = None
            if memory is not None:  # one copy here saves a strided read at every step
                _, *cross = layer.multihead_attn.project(None, memory[0], memory[0])
                cross = tuple(unpack(x, memory[1]).transpose(1, 2).contiguous() for x in cross)
            self.layers.append(LayerCache(keys, values, cross))
        if memory is not None and not memory[1].full:
            self.memory_lengths = memory[1].offsets.diff()
        self.lengths = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths = lengths  # a new tensor, because callers may hold the old one

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return self.lengths.numel()

    @property
    def device(self) -> torch.device:
        """The device of the keys and values."""
        return self.layers[0].keys.device

    def tokens_of(self, x: Tensor, lengths: Tensor | Layout | None) -> tuple[Tensor, Layout | None]:
        """Return new tokens as layers read them: `[R, t, D]` without a layout, or packed `[T, D]` with one.

        Arguments and errors are those of a stack's `step`.
        """
        check_tensors(("x", "the cache"), x, (self.layers[0].keys,))
        if isinstance(lengths, Layout):
            fits = lengths.known and lengths.batch == self.rows and x.dim() == 2 and x.shape[0] == lengths.total
            if not fits:
                raise ValueError(
                    f"x must be [{lengths.total}, width], as lengths says, of {self.rows} sequences, not "
                    f"{list(x.shape)} of {lengths.batch}"
                )
            return x, without_gaps(lengths, x.device)
        if x.dim() != 3 or x.shape[0 if self.batch_first else 1] != self.rows:
            shape = f"[{self.rows}, tokens, width]" if self.batch_first else f"[tokens, {self.rows}, width]"
            raise ValueError(f"x must be of shape {shape}, not {list(x.shape)}")
        x = x if self.batch_first else x.transpose(0, 1)
        count = x.shape[1]
        if lengths is None:
            if self._reads_uniformly(count):
                return x, None
            lengths = torch.full((self.rows,), count, device="cpu")
        layout = Layout.from_lengths(lengths, x.device, count)
        return pack(x, layout), layout

    def _reads_uniformly(self, count: int) -> bool:
        """Return whether `count` tokens of each row can be written without a layout."""
        return count == 1 or not self.rows or bool((self.lengths == self.lengths[0]).all())

    def write(self, count: int, layout: Layout | None) -> KVWrite:
        """Return how new tokens are written, `count` of each row or packed, and reserve capacity for them."""
        lengths = self.lengths
        least, most = (int(lengths.min()), int(lengths.max())) if self.rows else (0, 0)
        end = most + count if layout is None else int((lengths + layout.lengths).max()) if self.rows else 0
        self._reserve(end)
        if layout is None and least == most:
            return KVWrite(end, most, self.device)
        first = layout is not None and not bool((lengths * layout.lengths).any())
        (past,) = send(self.device, lengths)
        return KVWrite(end, past, self.device, layout, first)

    def attentions(self, index: int, layer: Any, write: KVWrite) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Return the attention callables for a layer's `compose`: to the tokens of a row, and to its memory."""
        layer_cache = self.layers[index]
        own = partial(write.attend, layer.self_attn, layer_cache)
        if layer_cache.memory is None:
            return (own,)
        return own, partial(write.attend_to_memory, layer.multihead_attn, layer_cache, self)

    def memory_limits(self, q: Tensor, positions: int) -> dict[str, Any]:
        """Return the arguments that hide the padding of memories from queries: their lengths, or a mask."""
        lengths = self.memory_lengths
        if lengths is None:
            return {}
        if not prefers_mask(q):
            return {"key_lengths": lengths}
        cached = self._memory_mask
        if cached is None or cached[0] is not lengths or cached[1].dtype != q.dtype:
            cached = self._memory_mask = lengths, length_mask(lengths, positions, q)
        return {"mask": cached[1]}

    def advance(self, count: int, layout: Layout | None) -> None:
        """Add the new tokens to the lengths of the rows."""
        self._set_lengths(self.lengths + (count if layout is None else layout.lengths))

    def _reserve(self, length: int) -> None:
        """Increase a capacity below `length` to at least `length`: at least twofold, but at most to `longest`."""
        if self.longest is not None and length > self.longest:
            raise ValueError(f"longest must be at least the {length} tokens that a row would have, not {self.longest}")
        if length > self.capacity:
            capacity = max(length, 2 * self.capacity, _FIRST_CAPACITY)
            capacity = capacity if self.longest is None else min(capacity, self.longest)
            for layer_cache in self.layers:
                layer_cache.grow(capacity)
            self.capacity = capacity  # only after all have grown, because an allocation may fail

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue from the tokens that row `rows[i]` has read, int64 `[R]`.

        With one hypothesis a sentence, the memories of rows move too. With more, the rows of a sentence share its
        memory, so `rows[i]` must be of the same sentence as i (else ValueError). The cache is unchanged if an
        allocation fails.
        """
        sources = _indices("rows", rows, self.rows)
        if sources.numel() != self.rows:
            raise ValueError(f"rows must be of shape [{self.rows}], not {list(sources.shape)}")
        targets = torch.arange(self.rows, device="cpu")
        across = bool((sources // self.hypotheses != targets // self.hypotheses).any())
        if across and self.hypotheses > 1:
            raise ValueError(f"rows must be among the {self.hypotheses} of the same sentence, not {sources.tolist()}")
        # Usually at most half of the rows move (128 rows, 28 steps, 6 layers: 7.9 ms; all rows: 15.4 ms).
        moved = (sources != targets).nonzero().squeeze(1)
        to, parents = send(self.device, moved, sources[moved])
        filled = self._filled()
        written = [x[:, :, :filled] for layer_cache in self.layers for x in (layer_cache.keys, layer_cache.values)]
        if across:
            self._memory_mask = None
            written += [x for layer_cache in self.layers for x in layer_cache.memory or ()]
            written += [] if self.memory_lengths is None else [self.memory_lengths]
        lengths = self.lengths[sources.to(self.lengths.device)]
        # Gathers all before writing, because an allocation may fail (32 rows, 28 steps, 6 layers: 3.1 ms, not 2.7).
        gathered = [x.index_select(0, parents) for x in written]
        for x, moved_rows in zip(written, gathered, strict=True):
            x.index_copy_(0, to, moved_rows)
        self._set_lengths(lengths)

    @torch.inference_mode(False)
    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences alone, int64, in this order, each with its N rows; a sentence may be repeated."""
        chosen = _indices("sentences", sentences, self.rows // self.hypotheses)
        rows = (chosen[:, None] * self.hypotheses + torch.arange(self.hypotheses, device="cpu")).flatten()
        lengths, memory_lengths = self.lengths[rows.to(self.lengths.device)], self.memory_lengths
        rows, chosen = send(self.device, rows, chosen)
        layers = [layer_cache.select(rows, chosen) for layer_cache in self.layers]
        if memory_lengths is not None:
            memory_lengths = memory_lengths.index_select(0, chosen)
        # Assigned together, so that a failed allocation or Ctrl-C leaves the cache unchanged.
        self.layers, self.lengths, self.memory_lengths = layers, lengths, memory_lengths

    def crop(self, lengths: Tensor | int) -> None:
        """Keep only the first tokens of each row: `lengths` of them, int64 `[R]`, or one number for all rows."""
        new_lengths = lengths_of("lengths", [lengths] * self.rows if isinstance(lengths, int) else lengths)
        read = self.lengths.cpu()
        if new_lengths.shape != read.shape or bool((new_lengths > read).any()):
            raise ValueError(f"lengths must be from 0 to the cache's, {read.tolist()}, not {new_lengths.tolist()}")
        if bool((new_lengths < read).any()):
            # Zeros, because a weight of 0 does not hide NaN.
            first, last = int(new_lengths[new_lengths < read].min()), int(read.max())
            (forgotten,) = send(self.device, torch.arange(first, last, device="cpu") >= new_lengths[:, None])
            for layer_cache in self.layers:
                for x in (layer_cache.keys, layer_cache.values):
                    x[:, :, first:last].masked_fill_(forgotten[:, None, :, None], 0.0)
        self._set_lengths(new_lengths)

    def _filled(self) -> int:
        """Return how many positions may be filled."""
        return int(self.lengths.max()) if self.rows else 0


class StaticKVCache(KVCache):
    """Keys and values for R rows of at most `capacity` tokens.

    A CUDA graph can capture a step of one token a row, but no other step, nor `reorder`, `keep`, `crop` and `grow`;
    `keep` and `grow` replace the tensors. `lengths` is on the device: attention reads it, and replayed graphs
    update it. The kernels skip unfilled positions; plain PyTorch computes them, so this costs more than `KVCache`.
    """

    @torch.inference_mode(False)
    def __init__(self, *arguments: Any, capacity: int = 1) -> None:
        check_value("capacity", capacity, int, at_least=1)
        super().__init__(*arguments)
        self.grow(capacity)
        self.lengths = self.lengths.to(self.device)
        self._empty = True  # no row has read anything

    def grow(self, capacity: int) -> None:
        """Increase the capacity to `capacity` tokens a row; replaces the tensors."""
        check_value("capacity", capacity, int, {"the present capacity": self.capacity}, at_least="the present capacity")
        for layer_cache in self.layers:
            layer_cache.grow(capacity)
        self.capacity = capacity

    def gather(self, rows: Tensor) -> None:
        """Reorder as `reorder` does among the hypotheses of a sentence, by int64 `[R]` on the device, not checked.

        A CUDA graph can capture it: it copies all rows, whether they move or not.
        """
        for layer_cache in self.layers:
            for x in (layer_cache.keys, layer_cache.values):
                x.copy_(x.index_select(0, rows))
        self.lengths.copy_(self.lengths.index_select(0, rows))

    def write(self, count: int, layout: Layout | None) -> KVWrite:
        if readable(self.lengths):
            end = self.lengths.max() + count if layout is None else (self.lengths + layout.lengths).max()
            if end > self.capacity:
                raise ValueError(f"capacity must be at least the {int(end)} tokens of a row, not {self.capacity}")
        return KVWrite(self.capacity, self.lengths, self.device, layout, self._empty)

    def advance(self, count: int, layout: Layout | None) -> None:
        self.lengths.add_(count if layout is None else layout.offsets.diff())
        self._empty = False

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths.copy_(lengths)

    def _reads_uniformly(self, count: int) -> bool:
        return count == 1

    def _filled(self) -> int:
        return self.capacity


def make_cache(*arguments: Any, longest: int | None, capacity: int | None) -> KVCache:
    """Make a cache that grows, or one of fixed capacity, for a stack, rows, memory and hypotheses."""
    if capacity is None:
        return KVCache(*arguments, longest=longest)  # type: ignore[misc]
    if longest is not None:
        raise ValueError(f"longest must be None with capacity, which limits the tokens of a row, not {longest}")
    return StaticKVCache(*arguments, capacity=capacity)


def _indices(name: str, indices: Tensor, below: int) -> Tensor:
    """Return indices on the CPU, checked; waits for their device."""
    on_cpu = lengths_of(name, indices)
    if on_cpu.numel() and int(on_cpu.max()) >= below:
        raise ValueError(f"{name} must be below {below}, not {int(on_cpu.max())}")
    return on_cpu
