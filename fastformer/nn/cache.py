"""Key and value caches of decoders: `cache = decoder.new_cache(memory)`, then `decoder.step(x, cache)`.

A step reads one token a row, a chunk, or prompts of different lengths. A layer is the same formula as without a cache
(`compose`), given another way to attend, so a step returns what a forward pass over everything returns there.

Tensors that are written to are made outside inference mode, so that a cache may be filled inside and outside in turn.

A cache grows as it is filled; `StaticKVCache` has a fixed capacity and leaves its lengths to the device, for CUDA
graphs.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, T of all rows, H heads, S positions,
K head size, D model width.
"""

import copy
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.host.devices import check_tensors, send
from fastformer.nn.inspection import Inspection, has_own_hooks, inspect_stack, is_sharded
from fastformer.nn.kv_write import KVWrite, LayerCache, length_mask, prefers_mask
from fastformer.nn.rotary import Positions
from fastformer.packing import Layout, lengths_of, pack, unpack
from fastformer.settings import check_value

_FIRST_CAPACITY = 32


def without_gaps(layout: Layout, device: torch.device) -> Layout:
    """Return the layout of the same sequences, each beginning at column 0, as a cache keeps them."""
    return layout if layout.slots is layout.origin else Layout.from_lengths(layout.lengths, device)


def check_apart(stack: Any, what: str) -> Inspection:
    """Refuse to take a stack and its layers apart where calling the stack does more; return what was inspected.

    Raises:
        RuntimeError: a part has hooks, a forward of its own or parameters that are not gathered, or there are no
            layers; the message says `what` takes the stack apart.
    """
    if not len(stack.layers):
        raise RuntimeError(f"the stack has no layers, of which {what} consists")
    inspection = inspect_stack(stack, everywhere=False)
    reason = "the stack has hooks" if has_own_hooks(stack) and not is_sharded(stack) else inspection.called
    if reason is not None:
        raise RuntimeError(f"{reason}, which {what} does not call; calling the model does")
    for name, part in (("the stack", stack), *((f"layers.{index}", layer) for index, layer in enumerate(stack.layers))):
        if is_sharded(part) and any(hasattr(parameter, "device_mesh") for parameter in part.parameters()):
            raise RuntimeError(f"{name} holds a part of its parameters, and {what} gathers none: unshard() it")
    return inspection


def _memory(layer: Any, tokens: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    # One copy here saves a strided read at every step.
    keys, values = (unpack(x, layout).transpose(1, 2).contiguous() for x in layer.multihead_attn.keys_values(tokens))
    return keys, values


class KVCache:
    """Keys and values of all layers of a stack, for R rows; made by its `new_cache`, filled by its `step`.

    Attributes:
        lengths: int64 `[R]`, on the CPU: how many tokens each row has read. To be looked at only.
        hypotheses: N, rows that share one sentence's memory.
        longest: the most tokens that a row may read; None: no limit.
        memory_lengths: int64 `[B]`, on the device; None where all memories are equally long, or there are none.
        layers: a `LayerCache` for each layer.
        stack_id: names the stack that made the cache; copies of a stack that has made one share its name.
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
        inspection = check_apart(stack, "decoding with a cache")
        if inspection.mixing is not None:
            declared = "a step reads one position; fastformer.token_wise declares parts that treat each token alone"
            raise RuntimeError(f"{inspection.mixing}: it may look at several positions, and {declared}")
        if any(layer.multihead_attn.counts_positions for layer in stack.layers if hasattr(layer, "multihead_attn")):  # type: ignore[union-attr]
            raise RuntimeError("attention to the memory counts positions, which no step knows")
        state: dict[str, Any] = stack.__dict__
        self.stack_id: str = state.setdefault("_stack_id", uuid.uuid4().hex)
        self.hypotheses, self.longest, self.capacity = hypotheses, longest, 0
        self.batch_first = inspection.batch_first is not False
        self.memory_lengths: Tensor | None = None
        self._memory_mask: tuple[Tensor, Tensor] | None = None  # of which lengths, and it
        self.layers: list[LayerCache] = []
        for layer in stack.layers:  # type: ignore[union-attr]
            attention: Any = layer.self_attn
            # Of no tokens: their dtype under autocast, heads and head size.
            like = attention.in_proj_weight if attention._qkv_same_embed_dim else attention.q_proj_weight
            nothing = like.new_zeros(0, attention.embed_dim)
            empty = attention.keys_values(nothing, Positions(nothing.new_empty(0, dtype=torch.int64), 1))
            keys, values = (x.new_zeros(rows, x.shape[1], 0, x.shape[2]) for x in empty)
            self.layers.append(LayerCache(keys, values, None if memory is None else _memory(layer, *memory)))
        if memory is not None and not memory[1].full:
            self.memory_lengths = memory[1].offsets.diff()
        self.lengths = torch.zeros(rows, dtype=torch.int64, device="cpu")

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths = lengths  # those of before may be looked at

    @torch.inference_mode(False)
    def __deepcopy__(self, known: dict[int, Any]) -> "KVCache":
        other = known[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update(copy.deepcopy(self.__dict__, known))
        return other

    @property
    def rows(self) -> int:
        """R."""
        return self.lengths.numel()

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.layers[0].keys.device

    def tokens_of(self, x: Tensor, lengths: Tensor | Layout | None) -> tuple[Tensor, Layout | None]:
        """Return new tokens as layers read them: `[R, t, D]` where that is all there is, or `[T, D]` with a layout.

        Arguments as of a stack's `step`, errors too.
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
        """Return whether `count` tokens of each row need no layout."""
        return count == 1 or not self.rows or bool((self.lengths == self.lengths[0]).all())

    def write(self, count: int, layout: Layout | None) -> KVWrite:
        """Return where new tokens go, `count` of each row or as a layout says, and make room for them."""
        if layout is not None:
            end = int((self.lengths + layout.lengths).max()) if self.rows else 0
            self._reserve(end)
            first = not bool((self.lengths * layout.lengths).any())
            (past,) = send(self.device, self.lengths)
            return KVWrite.packed(layout, past, end, first)
        least, most = (int(self.lengths.min()), int(self.lengths.max())) if self.rows else (0, 0)
        self._reserve(most + count)
        if least == most:
            return KVWrite(most + count, self.device, most)
        (positions,) = send(self.device, self.lengths)
        return KVWrite.ragged(positions, most + 1)

    def attentions(self, index: int, layer: Any, write: KVWrite) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Return what a layer's `compose` takes: attention to what the rows have read, and to the memory."""
        kept = self.layers[index]

        def own(x: Tensor) -> Tensor:
            return write.attend(layer.self_attn, kept, x)  # type: ignore[no-any-return]

        def memory(x: Tensor) -> Tensor:
            return write.attend_to_memory(layer.multihead_attn, kept, self, x)

        return (own,) if kept.memory is None else (own, memory)

    def memory_limits(self, q: Tensor, positions: int) -> dict[str, Any]:
        """What keeps queries from the padding of memories: their lengths, or a mask."""
        lengths = self.memory_lengths
        if lengths is None:
            return {}
        if not prefers_mask(q):
            return {"key_lengths": lengths}
        kept = self._memory_mask
        if kept is None or kept[0] is not lengths or kept[1].dtype != q.dtype:
            kept = self._memory_mask = lengths, length_mask(lengths, positions, q)
        return {"mask": kept[1]}

    def advance(self, count: int, layout: Layout | None) -> None:
        """Remember that new tokens were read."""
        self._set_lengths(self.lengths + (count if layout is None else layout.lengths))

    def _reserve(self, length: int) -> None:
        """Have room for `length` positions: for twice as many as before if it does not suffice."""
        if self.longest is not None and length > self.longest:
            raise ValueError(f"longest must be at least the {length} tokens that a row would have, not {self.longest}")
        if length > self.capacity:
            capacity = max(length, 2 * self.capacity, _FIRST_CAPACITY)
            capacity = capacity if self.longest is None else min(capacity, self.longest)
            for kept in self.layers:
                kept.grow(capacity)
            self.capacity = capacity  # not before all have grown: memory may not suffice

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row `rows[i]` has read.

        Args:
            rows: int64 `[R]`. With one hypothesis a sentence, any rows, and memories move along. With more, rows of the
                same sentence, whose memory they share.

        Raises:
            ValueError: rows are not R rows of the cache, or leave their sentence.

        Where memory does not suffice, the cache is as it was; Ctrl-C while rows are written leaves some moved.
        """
        sources = _indices("rows", rows, self.rows)
        if sources.numel() != self.rows:
            raise ValueError(f"rows must be of shape [{self.rows}], not {list(sources.shape)}")
        here = torch.arange(self.rows, device="cpu")
        away = bool((sources // self.hypotheses != here // self.hypotheses).any())
        if away and self.hypotheses > 1:
            raise ValueError(f"rows must stay among the {self.hypotheses} of their sentence: {sources.tolist()}")
        # Most often half of the rows or fewer change place (128 rows, 28 steps, 6 layers: 7.9 ms, not 15.4 for all).
        moved = (sources != here).nonzero().squeeze(1)
        to, parents = send(self.device, moved, sources[moved])
        filled = self._filled()
        written = [x[:, :, :filled] for kept in self.layers for x in (kept.keys, kept.values)]
        if away:
            self._memory_mask = None
            written += [x for kept in self.layers for x in kept.memory or ()]
            written += [] if self.memory_lengths is None else [self.memory_lengths]
        lengths = self.lengths[sources.to(self.lengths.device)]
        # All before the first is written: memory may not suffice (32 rows, 28 steps, 6 layers: 3.1 ms, not 2.7).
        found = [x.index_select(0, parents) for x in written]
        for x, moves in zip(written, found, strict=True):
            x.index_copy_(0, to, moves)
        self._set_lengths(lengths)

    @torch.inference_mode(False)
    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences, int64, in this order, each with its N rows; one given twice goes on twice.

        Raises:
            ValueError: they are not sentences of the cache.
        """
        chosen = _indices("sentences", sentences, self.rows // self.hypotheses)
        rows = (chosen[:, None] * self.hypotheses + torch.arange(self.hypotheses, device="cpu")).flatten()
        lengths, memory_lengths = self.lengths[rows.to(self.lengths.device)], self.memory_lengths
        rows, chosen = send(self.device, rows, chosen)
        layers = [kept.select(rows, chosen) for kept in self.layers]
        if memory_lengths is not None:
            memory_lengths = memory_lengths.index_select(0, chosen)
        # At once: what comes in between, memory that does not suffice or Ctrl-C, leaves the cache as it was.
        self.layers, self.lengths, self.memory_lengths = layers, lengths, memory_lengths

    def crop(self, lengths: Tensor | int) -> None:
        """Forget all but the first tokens of each row: `lengths` of them, int64 `[R]`, or as many of each.

        Raises:
            ValueError: a row has not read as many.
        """
        wanted = (
            torch.full((self.rows,), lengths, device="cpu")
            if isinstance(lengths, int)
            else lengths_of("lengths", lengths)
        )
        read = self.lengths.cpu()
        if wanted.shape != read.shape or bool(((wanted > read) | (wanted < 0)).any()):
            raise ValueError(f"lengths must be from 0 to {read.tolist()}, of each row, not {wanted.tolist()}")
        self._forget(wanted, read)
        self._set_lengths(wanted.clone())

    def _forget(self, lengths: Tensor, read: Tensor) -> None:
        """Set to 0 what rows have read beyond these lengths: a weight of 0 hides no NaN."""
        if not bool((lengths < read).any()):
            return
        first, last = int(lengths[lengths < read].min()), int(read.max())
        (forgotten,) = send(self.device, torch.arange(first, last, device="cpu") >= lengths[:, None])
        for kept in self.layers:
            for x in (kept.keys, kept.values):
                x[:, :, first:last].masked_fill_(forgotten[:, None, :, None], 0.0)

    def _filled(self) -> int:
        """How many positions may hold something."""
        return int(self.lengths.max()) if self.rows else 0


def _indices(name: str, indices: Tensor, below: int) -> Tensor:
    """Indices, checked, on the CPU; waits for the device that they are on."""
    found = lengths_of(name, indices)
    if found.numel() and int(found.max()) >= below:
        raise ValueError(f"{name} must be below {below}, not {int(found.max())}")
    return found
