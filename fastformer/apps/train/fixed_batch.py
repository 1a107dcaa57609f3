"""Batches of a few shapes in memory at fixed addresses, as CUDA graphs of training steps require.

The shapes of a batch are rounded up, and sequences of padding fill them: at most 15 tokens or a sixteenth of a side.
Padding has no targets and no real token attends to it, so the loss and all gradients stay the same. With the lengths of
Multi30k en-de, 4 epochs, shapes and share of padding: 19 and 2.0 % for random batches of 128 sentences, 8 and 0.9 % for
random ones of 4,096 tokens, 31 and 0.8 % for bucketed ones of 4,096, 180 and 0.9 % for bucketed ones of 128 sentences.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.text import Side
from fastformer.packing import Layout
from fastformer.packing.sizes import filler_lengths, power_of_two

_PER_OCTAVE = 16  # numbers of tokens between 2,048 and 4,096, say
_FEWEST_TOKENS = 16  # and their unit below 512, because matrix units take rows by 16
_SHORTEST = 64  # rows of the tallest tile of attention's kernels: shorter sequences take as many programs
_ALIGNMENT = 16  # int64s: 128 bytes, what torch's own tensors begin at
_PADDING_ID, _IGNORED = 0, -100  # the second is the losses' ignore_index

Ints = NDArray[np.int64]


class Shape(NamedTuple):
    """Rounded sizes of a batch; `tokens` and `longest` have a number for each side."""

    sequences: int  # B
    tokens: tuple[int, ...]
    longest: tuple[int, ...]


def sides_of(batch: Any) -> tuple[Side, ...]:
    """Return the sides of a batch; raises TypeError if they do not name all fields, or ids are not packed."""
    sides: tuple[Side, ...] = getattr(batch, "SIDES", ())
    packed = all(getattr(batch, name).dim() == 1 for side in sides for name in side.inputs + side.targets)
    named = {name for side in sides for name in (side.lengths, *side.inputs, *side.targets)}
    if not sides or not packed or {each.name for each in fields(batch)} != named:
        raise TypeError(
            "cuda_graphs=True needs batches of packed ids whose SIDES name all fields, as fastformer.apps.text.Batch "
            f"and LanguageBatch have; not {type(batch).__name__}{' with padded ids' if sides and not packed else ''}"
        )
    return sides


def shape_of(batch: Any, longest: int | None = None) -> Shape:
    """Return the shape that a batch on the CPU is rounded up to; the same for every batch of the same sizes.

    longest: tokens of the longest sequence that the model takes; None: any.
    """
    lengths = [getattr(batch, side.lengths) for side in sides_of(batch)]
    tokens = tuple(_round_tokens(int(x.sum())) for x in lengths)
    limits = tuple(_round_length(int(x.max()) if len(x) else 0, longest) for x in lengths)
    needed = [
        len(filler_lengths(total - int(x.sum()), most)) for x, total, most in zip(lengths, tokens, limits, strict=True)
    ]
    return Shape(power_of_two(len(lengths[0]) + max(needed)), tokens, limits)


def _round_tokens(count: int) -> int:
    """Return the next multiple of a sixteenth of the power of two below, or of 16."""
    unit = max(power_of_two(count) // (2 * _PER_OCTAVE), _FEWEST_TOKENS)
    return max(-(-count // unit), 1) * unit


def _round_length(length: int, longest: int | None) -> int:
    rounded = max(power_of_two(length), _SHORTEST)
    return rounded if longest is None else max(min(rounded, longest), length, 1)


class FixedBatch:
    """Device memory for batches of one shape: call `load`, then pass `batch()` to the model, any number of times."""

    def __init__(self, like: Any, shape: Shape, device: torch.device) -> None:
        self._like, self._shape, self._sides = like, shape, sides_of(like)
        self._slices: dict[tuple[int, str], slice] = {}
        end = 0
        for number, side in enumerate(self._sides):
            total = shape.tokens[number]
            sizes = {"offsets": shape.sequences + 1, "positions": total, "slots": total}
            for name, size in (sizes | dict.fromkeys(side.inputs + side.targets, total)).items():
                self._slices[number, name] = slice(end, end + size)
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(end, dtype=torch.int64, device=device)
        self._views = {key: self._memory[span] for key, span in self._slices.items()}

    def load(self, batch: Any) -> None:
        """Copy a batch from the CPU in one transfer, without waiting for the device."""
        # torch reuses freed pinned memory only after its copies have ended.
        staged = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.is_cuda)
        values: Ints = staged.numpy()
        for number, side in enumerate(self._sides):
            for name, value in self._laid_out(batch, number, side).items():
                values[self._slices[number, name]] = value
        self._memory.copy_(staged, non_blocking=True)

    def batch(self) -> Any:
        """Return the batch that was loaded last, with layouts in place of lengths; its tensors are always the same."""
        values: dict[str, Any] = {}
        for number, side in enumerate(self._sides):
            offsets, positions, slots = (self._views[number, name] for name in ("offsets", "positions", "slots"))
            values[side.lengths] = Layout.in_place(offsets, positions, slots, self._shape.longest[number])
            values |= {name: self._views[number, name] for name in side.inputs + side.targets}
        return replace(self._like, **values)

    def _laid_out(self, batch: Any, number: int, side: Side) -> dict[str, Ints]:
        """Return offsets, positions, slots, ids and targets of a side, with padding at the end."""
        total, longest = self._shape.tokens[number], self._shape.longest[number]
        real: Ints = getattr(batch, side.lengths).numpy()
        count = int(real.sum())
        filled = [*real.tolist(), *filler_lengths(total - count, longest)]
        lengths = np.array(filled + [0] * (self._shape.sequences - len(filled)), np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.repeat(np.arange(self._shape.sequences), lengths)
        positions = np.arange(total) - offsets[rows]
        arrays = {"offsets": offsets, "positions": positions, "slots": rows * longest + positions}
        for names, fill in ((side.inputs, _PADDING_ID), (side.targets, _IGNORED)):
            for name in names:
                arrays[name] = np.full(total, fill, np.int64)
                arrays[name][:count] = getattr(batch, name).numpy()
        return arrays
