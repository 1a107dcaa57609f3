"""Sequences with labels, one a token or one a sequence: the batches that classifiers learn from. There is no padding.

No special ids are added: what the sequences hold is what the model sees. The order depends on (seed, epoch) only, so a
run resumed at batch i of epoch n sees exactly the batches that the uninterrupted run would have seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fastformer.packing import Layout
from fastformer.settings import check_value

from .encoding import Ints, Sequences
from .process_shares import rows_of, share_of
from .sides import Side, on_device

IGNORED = -100  # a label that counts for nothing; torch's default ignore_index


@dataclass(frozen=True)
class LabelledBatch:
    """B sequences. Ids are int64, packed `[T]` or padded at the end `[B, L]`; labels have their shape, or are `[B]`.

    Labels of one a sequence are `[B]`; -100 counts for nothing. The lengths stay on the CPU, so that no device has to
    be waited for to lay a batch out.
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor  # [B]

    layouts: ClassVar[tuple[Layout, ...]] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Labels that count, padding and -100 left out: what a loss is divided by. Call it before `to`."""
        labels = self.labels
        if labels.dim() == 2:
            labels = labels[torch.arange(labels.shape[1], device=labels.device) < self.lengths[:, None]]
        return int((labels != IGNORED).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "LabelledBatch":
        """The batch with ids and labels on `device`, in one transfer with their `layouts`; the lengths stay on the CPU.

        Nothing waits for the device, whatever `non_blocking` says.
        """
        return on_device(self, (Side("lengths", ("ids",), ("labels",)),), device)

    def share(self, rank: int, world: int) -> "LabelledBatch | None":
        """The sequences of process `rank` of `world`, in the same form; None where it gets none."""
        rows = share_of(self.lengths, rank, world)
        each = self.labels.dim() == 1 and len(self.labels) == len(self.lengths)  # one label a sequence
        if each and self.labels.shape == self.ids.shape and bool((self.lengths != 1).any()):
            # As many packed tokens as sequences: the labels may be of either, so the batch stays in one piece.
            rows = slice(0, len(self) if rank == 0 else 0)
        if rows.start == rows.stop:
            return None
        labels = self.labels[rows] if each else rows_of(self.labels, self.lengths, rows)
        return LabelledBatch(rows_of(self.ids, self.lengths, rows), labels, self.lengths[rows])


class LabelledBatches:
    """The batches of each epoch, packed, of `size` sequences each (the last may have fewer).

    Args:
        sequences: of ids, N of them; one may be empty.
        labels: N sequences of the same lengths, or an integer array `[N]`; -100 counts for nothing.
        size: sequences in a batch.
        seed: of the order.
        shuffle: random order, another one each epoch; otherwise that of the sequences, for validation.

    Raises:
        ValueError: sequences and labels do not fit together, there are none, or size is below 1.
    """

    def __init__(
        self, sequences: Sequences, labels: Sequences | Ints, *, size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        if len(sequences) == 0:
            raise ValueError("there are no sequences to make batches of")
        check_value("size", size, int, at_least=1)
        if len(labels) != len(sequences):
            raise ValueError(f"labels must be {len(sequences)}, one for each sequence, not {len(labels)}")
        if isinstance(labels, Sequences):
            different = np.flatnonzero(labels.lengths != sequences.lengths)
            if len(different):
                first = int(different[0])
                wanted, given = (int(x.lengths[first]) for x in (sequences, labels))
                raise ValueError(f"labels of sequence {first} must be {wanted}, one for each token, not {given}")
        elif labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be integers [N] or Sequences, not {labels.dtype} {list(labels.shape)}")
        self.sequences, self.labels = sequences, labels
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def batches_in(self, epoch: int) -> int:
        """Number of batches of an epoch, the same for all."""
        return -(-len(self.sequences) // self.size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[LabelledBatch]:
        """The batches of an epoch, from number `start` on: (epoch, batches already seen) resumes exactly."""
        count = len(self.sequences)
        order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else np.arange(count)
        for first in range(start * self.size, count, self.size):
            yield self._collate(order[first : first + self.size])

    def _collate(self, indices: Ints) -> LabelledBatch:
        chosen = self.sequences.take(indices)
        labels = self.labels.take(indices).ids if isinstance(self.labels, Sequences) else self.labels[indices]
        ids, targets, lengths = (torch.from_numpy(x.astype(np.int64)) for x in (chosen.ids, labels, chosen.lengths))
        return LabelledBatch(ids, targets, lengths)
