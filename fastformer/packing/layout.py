"""Sequences of different lengths, one after another, without padding.

A batch of B sequences is one tensor of T tokens `[T, ...]` and a `Layout` that states where each sequence begins. Only
attention needs the layout; other layers work token by token. If lengths are on the CPU, nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastformer.host.devices import check_tensors, check_types, send
from fastformer.modes import capturing, compiling, needs_dispatcher, readable

V = TypeVar("V")

MOST_TOKENS = 2**31 - 1  # of a batch: kernels count in int32


class RowMap(NamedTuple):
    """A map of M rows to distinct slots among N, in both directions.

    With the inverse, forward and backward both read rows in the order of their result: three times as fast as writing
    rows to their slots (2,244 x 4 rows of 64, one CPU core: 0.5 against 1.4 ms).

    Attributes:
        slots: int64 `[M]`, the slot of each row.
        inverse: int64 `[N]`, the row of each slot; M for an empty slot.
        heads: on a CPU, if the rows are the heads of tokens: the token and the head of each slot, int64 `[N]`, 0 for an
            empty slot, and the empty slots.
    """

    slots: Tensor
    inverse: Tensor
    heads: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, slots: Tensor, places: int, heads: int | None = None) -> "RowMap":
        """Return the map of rows to `slots`, among `places` slots; heads: of each token, if the rows are heads."""
        M = slots.numel()
        inverse = torch.full((places,), M, dtype=torch.int64, device=slots.device)
        inverse.index_copy_(0, slots, torch.arange(M, device=slots.device))
        if heads is None or not readable(inverse):
            return cls(slots, inverse)
        empty = (inverse == M).nonzero().flatten()
        row = inverse.index_fill(0, empty, 0)
        return cls(slots, inverse, (row // heads, row % heads, empty))

    def gather(self, x: Tensor) -> Tensor:
        """Read the rows from their slots: `[N, ...]` -> `[M, ...]`. Differentiable."""
        # Compilers, modes and transforms see torch's own ops.
        if x.requires_grad and torch.is_grad_enabled() and not needs_dispatcher():
            return _Move.apply(x, self, "gather")  # type: ignore[no-untyped-call, no-any-return]
        return x.index_select(0, self.slots)

    def spread(self, x: Tensor) -> Tensor:
        """Write the rows to their slots, zeros elsewhere: `[M, ...]` -> `[N, ...]`. Differentiable."""
        if x.requires_grad and torch.is_grad_enabled() and not needs_dispatcher():
            return _Move.apply(x, self, "spread")  # type: ignore[no-untyped-call, no-any-return]
        if compiling():
            return x.new_zeros(self.inverse.numel(), *x.shape[1:]).index_copy(0, self.slots, x)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.inverse)

    def spread_heads(self, x: Tensor) -> Tensor:
        """Write heads to their slots: `[T, H, K]` -> `[N, K]`; on a CPU, views of wider rows are not copied first."""
        if self.heads is None or type(x) is not Tensor or not x.numel() or needs_dispatcher():
            return self.spread(x.flatten(0, 1))
        if x.requires_grad and torch.is_grad_enabled():
            return _Move.apply(x, self, "spread_heads")  # type: ignore[no-untyped-call, no-any-return]
        T, H, K = x.shape
        if x.stride()[1:] != (K, 1) or x.stride(0) % K:
            x = x.contiguous()
        token, head, empty = self.heads
        step = x.stride(0) // K
        rows = x.as_strided(((T - 1) * step + H, K), (K, 1))
        return rows.index_select(0, torch.add(head, token, alpha=step)).index_fill_(0, empty, 0.0)


class _Move(torch.autograd.Function):
    """A method of `RowMap`; backward moves rows the other way, where torch's index_select would add up rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowMap, method: str) -> Tensor:
        ctx.rows, ctx.gathers, ctx.shape = rows, method == "gather", x.shape
        return getattr(rows, method)(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows: RowMap = ctx.rows
        return rows.spread(grads[0]) if ctx.gathers else rows.gather(grads[0]).view(ctx.shape), None, None


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of B sequences among T packed tokens, and in the padded batch `[B, columns]` that they come from.

    Attributes:
        lengths: int64 `[B]`, on the CPU; zero is allowed. On "meta" where only the device knows them
            (`from_static_tensors`).
        offsets: int64 `[B + 1]`, like the tensors below on the tokens' device; sequence b is
            `offsets[b]:offsets[b + 1]`.
        positions: int64 `[T]`; the position of each token in its sequence.
        slots: int64 `[T]`; the row of each token in `[B * max_length]`, where every sequence starts at column 0.
        shortest: the shortest length, 0 for an empty batch.
        max_length: the longest length, 0 for an empty batch.
        columns: the length L of the padded batch; max_length if there is none.
        origin: int64 `[T]`; the row of each token in the padded batch `[B * columns]`, which may have padding anywhere.
        batch: number of sequences B.
        total: number of tokens T.
        known: whether the host knows the lengths.

    Do not modify the tensors: layers cache values that depend on them, and the cache would not notice.
    """

    lengths: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    shortest: int
    max_length: int
    columns: int
    origin: Tensor
    _of_mask: bool = field(default=False, repr=False)
    _memory: dict[object, Any] = field(default_factory=dict, repr=False)
    batch: int = field(init=False, repr=False)
    total: int = field(init=False, repr=False)
    known: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.__dict__.update(batch=self.lengths.numel(), total=self.positions.numel(), known=not self.lengths.is_meta)

    @classmethod
    def from_lengths(
        cls, lengths: Tensor | Sequence[int], device: torch.device | str | None = None, columns: int | None = None
    ) -> "Layout":
        """Build the layout of sequences with these lengths `[B]`, for tokens on `device` (default: the CPU).

        columns: the length L of a padded batch in which every sequence starts at column 0; the longest if None.

        Raises:
            TypeError, ValueError: as `lengths_of`; lengths are beyond the row, or add up to more than `MOST_TOKENS`.
        """
        lengths = lengths_of("lengths", lengths)
        shortest, longest = _range(lengths)
        total = int(lengths.sum())
        if total > MOST_TOKENS:
            raise ValueError(f"lengths must add up to at most {MOST_TOKENS}, not {total}")
        if columns is not None and longest > columns:
            raise ValueError(f"a length of {longest} is beyond the row of {columns}")
        columns = longest if columns is None else columns
        offsets, rows, positions = _number(lengths, lengths, total)
        slots = rows * longest + positions
        origin = slots if columns == longest else rows * columns + positions
        offsets, positions, slots, origin = send(device, offsets, positions, slots, origin)
        return cls(lengths, offsets, positions, slots, shortest, longest, columns, origin)

    @classmethod
    def from_mask(cls, padding: Tensor) -> "Layout":
        """Build the layout of a padded batch from its padding mask, bool `[B, L]`, True = padding, anywhere in a row.

        Waits for the device if that is not the CPU.
        """
        check_types(("padding",), padding)
        if padding.dtype != torch.bool:
            raise TypeError(f"padding must be bool, True = padding, not {padding.dtype}")
        if padding.dim() != 2:
            raise ValueError(f"padding must be of shape [B, L], not {list(padding.shape)}")
        columns = padding.shape[1]
        real = ~padding
        on_device = real.sum(1)
        lengths = on_device.cpu()
        total, (shortest, longest) = int(lengths.sum()), _range(lengths)
        offsets, rows, positions = _number(lengths, on_device, total)
        flat = real.flatten()
        known = padding.device.type in ("cpu", "cuda")  # elsewhere torch has no nonzero of a known size
        origin = (torch.nonzero_static(flat, size=total) if known else flat.nonzero()).squeeze(1)
        slots = rows * longest + positions
        return cls(lengths, offsets, positions, slots, shortest, longest, columns, origin, True)

    @classmethod
    def from_static_tensors(cls, offsets: Tensor, positions: Tensor, slots: Tensor, max_length: int) -> "Layout":
        """Build a layout, for one step, of tensors that hold other sequences at each step, as a CUDA graph needs.

        max_length is an upper bound of the lengths, and the number of columns of the slots.
        """
        lengths = torch.empty(offsets.numel() - 1, dtype=torch.int64, device="meta")
        return cls(lengths, offsets, positions, slots, 0, max_length, max_length, slots)

    def to(self, device: torch.device | str) -> "Layout":
        """Return the layout of the same tokens on another device, in one transfer; from a CPU, nothing waits."""
        if torch.device(device) == self.offsets.device:
            return self
        offsets, positions, slots, origin = send(device, self.offsets, self.positions, self.slots, self.origin)
        return replace(self, offsets=offsets, positions=positions, slots=slots, origin=origin, _memory={})

    @property
    def full(self) -> bool:
        """Whether all sequences have the same length, so that `[B, max_length]` holds no padding."""
        return self.total == self.batch * self.max_length

    @property
    def has_gaps(self) -> bool:
        """Whether padding lies between two tokens of a sequence; waits for the device if the layout is of a mask."""
        steps, positions = self.origin.diff, self.positions
        return self._of_mask and self.cached("gaps", lambda: bool(((steps() != 1) & (positions[1:] > 0)).any()))

    @property
    def starts_rows(self) -> bool:
        """Whether every sequence begins at column 0 and has no gaps; waits for the device as `has_gaps` does."""
        L = max(self.columns, 1)
        return not self._of_mask or self.cached("starts", lambda: bool((self.origin % L == self.positions).all()))

    def mask(self) -> Tensor:
        """Return bool `[B, columns]`, True at real tokens, on the tokens' device; a new, writable tensor."""
        flat = torch.zeros(self.batch * self.columns, dtype=torch.bool, device=self.offsets.device)
        return flat.index_fill_(0, self.origin, True).view(self.batch, self.columns)

    def cached(self, name: object, make: Callable[[], V], other: "Layout | None" = None) -> V:
        """Return the result of `make`, cached by name, because all layers of a model need the same values.

        other: the layout of the keys, if the value depends on it; only the value for the last one is cached.
        """
        # While compiling or capturing tensors have no values, so nothing is cached, unless the layout is of that step.
        if compiling() or (self.known and capturing(self.offsets)):
            return make()
        other = None if other is self else other  # a layout that refers to itself would wait for the garbage collector
        key = (name, other is None)
        cached_other, value = self._memory.get(key, (self, None))
        if cached_other is not other:
            with torch.inference_mode(False):  # training cannot use inference tensors
                value = make()
            if not needs_dispatcher():  # else the value holds tensors of a mode or a transform
                self._memory[key] = other, value
        return value  # type: ignore[no-any-return]


def offsets_of(name: str, layout: Layout | None) -> Tensor:
    """Return the offsets of a layout; raise TypeError if it is no Layout."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{name} must be a Layout, not {type(layout).__name__}")
    return layout.offsets


def lengths_of(name: str, lengths: Any) -> Tensor:
    """Return lengths (a tensor, array or sequence of integers) as a new tensor, int64 `[B]` on the CPU.

    Raises:
        TypeError: lengths are not integers.
        ValueError: lengths are not one-dimensional, or one is negative or above `MOST_TOKENS`.
    """
    try:  # from Python's numbers: a copy, of any integer type
        counts = torch.as_tensor(
            lengths.tolist() if isinstance(lengths, Tensor | np.ndarray) else lengths, device="cpu"
        )
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = ValueError if isinstance(error, ValueError | OverflowError) else TypeError
        raise kind(f"{name} must be integers [B], not {str(lengths)[:99]}: {error}") from None
    counts = counts if counts.numel() else counts.to(torch.int64)
    if counts.dtype != torch.int64:
        raise TypeError(f"{name} must be integers, not {counts.dtype}")
    if counts.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional [B], not of shape {list(counts.shape)}")
    low, high = _range(counts)
    if low < 0:
        raise ValueError(f"{name} must not be negative: {low}")
    if high > MOST_TOKENS:
        raise ValueError(f"{name} must be at most {MOST_TOKENS}, not {high}")
    return counts


def _range(lengths: Tensor) -> tuple[int, int]:
    return (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)


def _number(lengths: Tensor, on_device: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets `[B + 1]`, and the sequence and the position of each of `total` tokens, on the device."""
    offsets = torch.zeros(on_device.numel() + 1, dtype=torch.int64, device=on_device.device)
    torch.cumsum(on_device, 0, out=offsets[1:])
    device = on_device.device
    rows = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), on_device, output_size=total)
    return offsets, rows, torch.arange(total, device=device) - offsets[rows]


def _padded_rows(layout: Layout, batch_first: bool) -> RowMap:
    """Return the map of tokens to rows of the flattened padded batch, `[B * columns]` or `[columns * B]`."""
    B, L, origin = layout.batch, layout.columns, layout.origin
    if batch_first:
        return layout.cached("batch first", lambda: RowMap.of(origin, B * L))
    return layout.cached("time first", lambda: RowMap.of(origin % L * B + origin // L, B * L))


def pack(padded: Tensor, layout: Layout, batch_first: bool = True) -> Tensor:
    """Take the real tokens out of a padded batch: `[B, L, ...]`, or `[L, B, ...]`, -> `[T, ...]`. Differentiable.

    L is layout.columns, or more. As with `Tensor.reshape`, the result may share the memory of a batch without padding.

    Raises:
        ValueError: the batch has another number of rows, or a sequence is longer than L.
    """
    check_tensors(("padded", "layout"), padded, (offsets_of("layout", layout),))
    rows, columns = padded.shape[:2] if batch_first else (padded.shape[1], padded.shape[0])
    B, T = layout.batch, layout.total
    if rows != B:
        raise ValueError(f"padded has {rows} rows, lengths has {B}")
    if columns < layout.columns:
        raise ValueError(f"a length of {layout.columns} is beyond the row of {columns}")
    if compiling():  # one graph for all batches, with and without padding
        row, column = layout.origin // layout.columns, layout.origin % layout.columns
        return padded[row, column] if batch_first else padded[column, row]
    if columns > layout.columns:
        padded = padded.narrow(1 if batch_first else 0, 0, layout.columns)
    if B * layout.columns == T:
        padded = padded if batch_first else padded.transpose(0, 1)
        return padded.reshape(T, *padded.shape[2:])
    return _padded_rows(layout, batch_first).gather(padded.flatten(0, 1))


def unpack(tokens: Tensor, layout: Layout, batch_first: bool = True) -> Tensor:
    """Put packed tokens into a padded batch of zeros: `[T, ...]` -> `[B, columns, ...]`, or `[columns, B, ...]`.

    Differentiable; the result may share memory as in `pack`. Raises ValueError for another number of tokens.
    """
    check_tokens(tokens, layout)
    B, L = layout.batch, layout.columns
    if layout.total == B * L and not compiling():
        padded = tokens.reshape(B, L, *tokens.shape[1:])
        return padded if batch_first else padded.transpose(0, 1).contiguous()
    flat = _padded_rows(layout, batch_first).spread(tokens)
    return flat.view(*((B, L) if batch_first else (L, B)), *tokens.shape[1:])


def check_tokens(tokens: Tensor, layout: Layout) -> None:
    """Raise ValueError unless tokens are as many as the layout has."""
    check_tensors(("tokens", "layout"), tokens, (offsets_of("layout", layout),))
    if tokens.shape[0] != layout.total:
        raise ValueError(f"tokens has {tokens.shape[0]} rows, the lengths add up to {layout.total}")


def from_nested(nested: Tensor) -> tuple[Tensor, Layout]:
    """Return the tokens `[T, ...]` and the layout of a nested tensor `[B, (ragged), ...]`. Differentiable.

    Raises:
        TypeError: the tensor is not nested.
        ValueError: a dimension other than the second is ragged.
    """
    check_types(("nested",), nested)
    if not nested.is_nested:
        raise TypeError(f"nested must be a nested tensor, not one of shape {list(nested.shape)}")
    sequences = nested.unbind()
    if any(sequence.shape[1:] != sequences[0].shape[1:] for sequence in sequences):
        raise ValueError("nested must be ragged in its second dimension alone")
    tokens = torch.cat(sequences) if sequences else torch.empty(0, dtype=nested.dtype, device=nested.device)
    return tokens, Layout.from_lengths([len(sequence) for sequence in sequences], nested.device)


def to_nested(tokens: Tensor, layout: Layout) -> Tensor:
    """Make a nested tensor `[B, (ragged), ...]` of layout torch.jagged around packed tokens. Differentiable."""
    check_tokens(tokens, layout)
    return torch.nested.nested_tensor_from_jagged(
        tokens, layout.offsets, min_seqlen=layout.shortest, max_seqlen=layout.max_length
    )
