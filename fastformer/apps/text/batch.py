"""Batches: ids of sequences and their lengths; move batches to a device, and share them between processes.

The lengths stay on the CPU, so that computing a layout does not wait for a device.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fastformer.host.devices import send

IGNORED = -100  # a label that the loss ignores; torch's default ignore_index


class Side(NamedTuple):
    """The names of a batch's fields that share one tensor of lengths."""

    lengths: str  # int64 [B]
    inputs: tuple[str, ...]  # ids that a model reads
    targets: tuple[str, ...] = ()  # ids that it predicts


@dataclass(frozen=True)
class SequenceBatch:
    """B sequences of one or several sides. Ids are int64, packed `[T]` or padded at the end `[B, L]`."""

    SIDES: ClassVar[tuple[Side, ...]] = ()

    def __len__(self) -> int:
        return len(self._lengths()[0])

    def _lengths(self) -> list[Tensor]:
        return [getattr(self, side.lengths) for side in self.SIDES]

    @property
    def tokens(self) -> int:
        """Tokens to predict, eos included, padding excluded; a loss is divided by them."""
        return int(self._lengths()[-1].sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch with its ids on `device`, sent in one transfer; the lengths stay on the CPU."""
        lengths = {side.lengths for side in self.SIDES}
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor) and name not in lengths]
        ids = send(device, *(getattr(self, name) for name in names))
        return replace(self, **dict(zip(names, ids, strict=True)))

    def share(self, rank: int, world: int) -> Self | None:
        """Return the sequences of process `rank` of `world`, in the same form; None if it gets none."""
        sequences = share_of(torch.stack(self._lengths()).sum(0), rank, world)
        return self._select(sequences) if sequences.start < sequences.stop else None

    def _select(self, sequences: slice) -> Self:
        values = {}
        for side, lengths in zip(self.SIDES, self._lengths(), strict=True):
            values[side.lengths] = lengths[sequences]
            values |= {name: select_ids(getattr(self, name), lengths, sequences) for name in side.inputs + side.targets}
        return replace(self, **values)


@dataclass(frozen=True)
class Batch(SequenceBatch):
    """B sentence pairs. Ids are int64, packed `[S_total]`, `[T_total]` or padded at the end `[B, S]`, `[B, T]`.

    The lengths count eos (source, target_out) or bos (target_in).
    """

    source: Tensor  # tokens + eos
    source_lengths: Tensor  # [B]
    target_in: Tensor  # bos + tokens
    target_out: Tensor  # tokens + eos
    target_lengths: Tensor  # [B]

    SIDES = (Side("source_lengths", ("source",)), Side("target_lengths", ("target_in",), ("target_out",)))


@dataclass(frozen=True)
class LanguageBatch(SequenceBatch):
    """B pieces of documents, packed: `ids_out[t]` is the token after `ids_in[t]`. Ids are int64 `[T]`."""

    ids_in: Tensor  # bos + tokens, or a window of that
    ids_out: Tensor  # tokens + eos, or the same window
    lengths: Tensor  # [B]

    SIDES = (Side("lengths", ("ids_in",), ("ids_out",)),)


@dataclass(frozen=True)
class LabelledBatch(SequenceBatch):
    """B sequences, none of them empty. Ids are int64, packed `[T]` or padded at the end `[B, L]`.

    Labels have the shape of ids, or are one for each sequence, `[B]`; the loss ignores -100.
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor  # [B]

    SIDES = (Side("lengths", ("ids",)),)

    @property
    def tokens(self) -> int:
        """Labels except padding and -100; a loss is divided by them. Call it before `to`."""
        labels = self.labels
        if labels.dim() == 2:
            labels = labels[torch.arange(labels.shape[1], device=labels.device) < self.lengths[:, None]]
        return int((labels != IGNORED).sum())

    def _select(self, sequences: slice) -> Self:
        of_rows = len(self.labels) == len(self)
        labels = self.labels[sequences] if of_rows else select_ids(self.labels, self.lengths, sequences)
        return replace(super()._select(sequences), labels=labels)


def share_of(lengths: Tensor, rank: int, world: int) -> slice:
    """Return the sequences of process `rank` of `world`: consecutive ones, with about as many tokens as in each other.

    A sequence goes to the process whose share of the tokens contains its middle; a process may get none. `lengths` are
    int64 `[B]`, on the CPU: tokens of each sequence, or another measure of work.
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    owners = ((2 * ends - lengths) * world // max(2 * total, 1)).clamp(max=world - 1)  # [B], ascending
    start, stop = torch.searchsorted(owners, torch.tensor([rank, rank + 1], device="cpu")).tolist()
    return slice(start, stop)


def select_ids(ids: Tensor, lengths: Tensor, sequences: slice) -> Tensor:
    """Return consecutive sequences of ids that are packed `[T]` or padded `[B, L]`, in the same form."""
    if ids.dim() == 2:
        return ids[sequences]
    start = int(lengths[: sequences.start].sum())
    return ids[start : start + int(lengths[sequences].sum())]
