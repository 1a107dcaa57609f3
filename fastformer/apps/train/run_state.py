"""`BatchSource`: the training data. `Position`: the progress of a run. `Result`: how a run ended."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pydantic.dataclasses

from fastformer.apps.train.config import TrainConfig

# How a run ended, in words, by `Result.reason`.
ENDS = {
    "steps": "all steps are made",
    "epochs": "all epochs are complete",
    "minutes": "the time is spent",
    "patience": "validations were no better for long enough",
    "interrupted": "interrupted",
}


class DivergedError(FloatingPointError):
    """The loss or the gradient is not finite; the last good checkpoint is untouched."""


class BatchSource(Protocol):
    """The training data. The batches of an epoch must depend on its number only, not on global generators.

    A batch has `tokens`, the number of real tokens that its loss is summed over, and `to(device, non_blocking)`.
    The source may have `unit`, the plural noun that progress output calls them, such as "texts".
    Several processes also need `share(rank, world)`, which returns the sentences of process `rank` as a batch, or None;
    every sentence must be in the batch of exactly one process. CUDA graphs need a dataclass whose `SIDES` name all its
    fields (`fastformer.apps.text.Side`), ids packed `[T]`, and a loss that accepts a `Layout` in place of lengths.
    """

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch (the first is 0)."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number `start` on."""


@pydantic.dataclasses.dataclass(config={"strict": True})
class Position:
    """The progress of a run, saved with each checkpoint.

    batch: batches of the current epoch so far. worse: validations since the best one. records: of metrics.jsonl.
    share: share of the held-out data that is validated. reserve: seconds that the end of the run will take.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_value: float | None = None
    worse: int = 0
    records: int = 0
    share: float = 1.0
    reserve: float = 0.0

    @property
    def shown_epoch(self) -> int:
        """The epoch as shown: counted from 1; between two epochs, the one that ended."""
        return self.epoch + (self.batch > 0)

    def end(self, config: TrainConfig) -> str | None:
        """Return the name of the budget that is used up, or "patience"; None if the run goes on."""
        if config.patience is not None and self.worse >= config.patience:
            return "patience"
        if config.steps is not None and self.step >= config.steps:
            return "steps"
        if config.minutes is not None and self.seconds + self.reserve >= 60 * config.minutes:
            return "minutes"
        return "epochs" if config.epochs is not None and self.epoch >= config.epochs else None

    def spent(self, config: TrainConfig, batches: BatchSource) -> float:
        """Return the spent share of the budget, 0 to 1; the largest share of several budgets."""
        shares = [0.0]
        if config.steps:
            shares.append(self.step / config.steps)
        if config.epochs:
            in_epoch = self.batch / max(batches.batches_in(self.epoch), 1) if self.batch else 0.0
            shares.append((self.epoch + in_epoch) / config.epochs)
        if config.minutes:
            shares.append(self.seconds / max(60 * config.minutes - self.reserve, 1e-9))
        return min(max(shares), 1.0)


@dataclass(frozen=True)
class Result:
    """How a run ended: `reason` is "steps", "epochs", "minutes", "patience" or "interrupted"; seconds in all."""

    reason: str
    step: int
    epoch: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
    best_value: float | None
    best: Path | None
