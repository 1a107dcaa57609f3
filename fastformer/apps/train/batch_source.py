"""What the training loop asks of data; `fastformer.apps.text.Batches` has it, and so may a user's own class."""

from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch


class AnyBatch(Protocol):
    """A batch of the training loop.

    Several processes need `share(rank, world)`, too: the part of process `rank`, a batch or None. Every sentence must
    be in exactly one of the parts. CUDA graphs need a dataclass whose `SIDES` name all its fields
    (`fastformer.apps.text.Side`), ids packed `[T]`, and a loss that takes a `Layout` in place of lengths and asks for
    nothing but the fields.
    """

    @property
    def tokens(self) -> int:
        """Real tokens that the loss is summed over."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on a device."""


class BatchSource(Protocol):
    """The training data. The batches of an epoch must depend on its number only, not on global generators.

    `longest`, if it has that, is the number of tokens of its longest sequence; CUDA graphs need it for models that
    take no longer ones.
    """

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch (the first is 0)."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number `start` on."""
