"""Sequences of different lengths, one after another, without padding.

A batch of B sequences is a run of T tokens `[T, ...]` and a `Layout` that says where each lies. Every layer that
works token by token (linear, norm, feed-forward, embedding, loss) takes the run as it is; attention alone needs the
layout. Lengths live on the CPU, so no step waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Where B sequences lie in a run of T tokens.

    Attributes:
        lengths: int64 `[B]`, on the CPU; zero is allowed.
        offsets: int64 `[B + 1]`, on the tokens' device; sequence b is `offsets[b]:offsets[b + 1]`.
        positions: int64 `[T]`, on the tokens' device; the position of each token in its sequence.
        slots: int64 `[T]`, on the tokens' device; the row of each token in the padded `[B * max_length]` form.
        max_length: the longest length, 0 for an empty batch.
    """

    lengths: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], device: torch.device | str | None = None) -> "Layout":
        """Build the layout of sequences with these lengths, for tokens on `device` (default: the CPU).

        Raises:
            TypeError: lengths are not integers.
            ValueError: lengths are not one-dimensional, or one is negative.
        """
        lengths = torch.as_tensor(lengths)
        if lengths.numel() == 0:
            lengths = lengths.to(torch.int64)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
            raise TypeError(f"lengths must be integers, not {lengths.dtype}")
        if lengths.dim() != 1:
            raise ValueError(f"lengths must be one-dimensional [B], not of shape {list(lengths.shape)}")
        lengths = lengths.to("cpu", torch.int64)
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must not be negative: {int(lengths.min())}")
        max_length = int(lengths.max()) if lengths.numel() else 0
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        total = int(offsets[-1])
        starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=total)
        positions = torch.arange(total) - starts
        rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths, output_size=total)
        slots = rows * max_length + positions
        offsets, positions, slots = (x.to(device, non_blocking=True) for x in (offsets, positions, slots))
        return cls(lengths, offsets, positions, slots, max_length)

    @property
    def batch(self) -> int:
        """B, the number of sequences."""
        return self.lengths.numel()

    @property
    def total(self) -> int:
        """T, the number of tokens."""
        return self.positions.numel()

    @property
    def full(self) -> bool:
        """Whether all sequences have the same length, so that the padded form holds no padding."""
        return self.total == self.batch * self.max_length

    @cached_property
    def shortest(self) -> int:
        """The shortest length, 0 for an empty batch."""
        return int(self.lengths.min()) if self.lengths.numel() else 0

    def mask(self) -> Tensor:
        """Bool `[B, max_length]` on the tokens' device, True at real tokens."""
        steps = torch.arange(self.max_length, device=self.offsets.device)
        return steps[None, :] < self.offsets.diff()[:, None]

    @cached_property
    def key_bias(self) -> Tensor:
        """Additive mask of the keys, fp32 `[B, 1, max_length]`: 0 at real tokens, -inf at padding."""
        mask = self.mask()[:, None]
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


def layout_from_mask(padding: Tensor) -> Layout | None:
    """Read the layout of a padded batch off its padding mask; waits for the device if the mask is not on the CPU.

    Args:
        padding: bool `[B, L]`, True = padding, as torch's key_padding_mask.

    Returns:
        None where a sequence does not start at column 0 or has gaps.
    """
    lengths = (~padding).sum(1)
    steps = torch.arange(padding.shape[1], device=padding.device)
    if not torch.equal(padding, steps >= lengths[:, None]):
        return None
    return Layout.from_lengths(lengths, padding.device)


class _Gather(torch.autograd.Function):
    """Rows `slots` of dimension `dim`. torch's own index_select adds in its backward; no slot is taken twice here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slots: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, slots, ctx.dim = inputs
        ctx.rows = x.shape[ctx.dim]
        ctx.save_for_backward(slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _Scatter.apply(grads[0], slots, ctx.dim, ctx.rows), None, None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """Zeros with the rows of x at `slots` of dimension `dim`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, slots: Tensor, dim: int, rows: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = rows
        return x.new_zeros(shape).index_copy_(dim, slots, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
        _, slots, ctx.dim, _ = inputs
        ctx.save_for_backward(slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return _Gather.apply(grads[0], slots, ctx.dim), None, None, None  # type: ignore[no-untyped-call]


def gather_slots(x: Tensor, layout: Layout, dim: int = 0) -> Tensor:
    """Take the real tokens out of dimension `dim`, of size B * max_length: it becomes T. Differentiable."""
    return _Gather.apply(x, layout.slots, dim)  # type: ignore[no-untyped-call, no-any-return]


def scatter_slots(x: Tensor, layout: Layout, dim: int = 0) -> Tensor:
    """Spread dimension `dim`, of size T, over zeros of size B * max_length. Differentiable."""
    rows = layout.batch * layout.max_length
    return _Scatter.apply(x, layout.slots, dim, rows)  # type: ignore[no-untyped-call, no-any-return]


def pack(padded: Tensor, layout: Layout) -> Tensor:
    """Take the real tokens out of a padded batch: `[B, L, ...]` -> `[T, ...]`. Differentiable.

    Args:
        padded: any dtype; L >= layout.max_length, sequences start at column 0.
        layout: of the B sequences.

    Raises:
        ValueError: the batch has another number of rows, or a sequence is longer than L.
    """
    rows, columns = padded.shape[:2]
    if rows != layout.batch:
        raise ValueError(f"padded has {rows} rows, lengths has {layout.batch}")
    if columns < layout.max_length:
        raise ValueError(f"a length of {layout.max_length} is beyond the row of {columns}")
    padded = padded[:, : layout.max_length]
    if layout.full:
        return padded.reshape(layout.total, *padded.shape[2:])
    return gather_slots(padded.flatten(0, 1), layout)


def unpack(tokens: Tensor, layout: Layout) -> Tensor:
    """Put packed tokens into a padded batch of zeros: `[T, ...]` -> `[B, max_length, ...]`. Differentiable.

    Raises:
        ValueError: the number of tokens is not the layout's.
    """
    if tokens.shape[0] != layout.total:
        raise ValueError(f"tokens has {tokens.shape[0]} rows, the lengths add up to {layout.total}")
    shape = (layout.batch, layout.max_length, *tokens.shape[1:])
    if layout.full:
        return tokens.reshape(shape)
    return scatter_slots(tokens, layout).view(shape)
