"""Protocols of the training loop's data, which `fastformer.apps.text.Batches` and users' own classes implement."""

from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch


class AnyBatch(Protocol):
    """A batch of the training loop.

    Several processes also need `share(rank, world)`, which returns the sentences of process `rank` as a batch, or None.
    Every sentence must be in the batch of exactly one process. CUDA graphs need a dataclass whose `SIDES` name all its
    fields (`fastformer.apps.text.Side`), and ids packed `[T]`. The loss must then accept a `Layout` in place of lengths
    and read nothing but the fields.
    """

    @property
    def tokens(self) -> int:
        """Real tokens that the loss is summed over."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on a device."""


class BatchSource(Protocol):
    """The training data. The batches of an epoch must depend on its number only, not on global generators.

    The optional attribute `longest` is the number of tokens of the longest sequence; CUDA graphs need it for models
    with a limit of length.
    """

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch (the first is 0)."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number `start` on."""
