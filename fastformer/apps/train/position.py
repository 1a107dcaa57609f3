"""Where a run stands, what of its budget is spent, and how it ended."""

from dataclasses import dataclass
from pathlib import Path

from fastformer.apps.train.batch_source import BatchSource
from fastformer.apps.train.config import TrainConfig


@dataclass
class Position:
    """The progress of a run, saved with each checkpoint.

    batch: of the epoch under way. validation_due: the checkpoint was written just before a validation. share: of the
    held-out data that is validated. reserve: seconds that the end of the run will take.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_value: float | None = None
    worse: int = 0
    records: int = 0
    validation_due: bool = False
    share: float = 1.0
    reserve: float = 0.0

    def end(self, config: TrainConfig) -> str | None:
        """Name the budget that is used up; None where the run goes on."""
        if config.steps is not None and self.step >= config.steps:
            return "steps"
        if config.minutes is not None and self.seconds + self.reserve >= 60 * config.minutes:
            return "minutes"
        return "epochs" if config.epochs is not None and self.epoch >= config.epochs else None

    def spent(self, config: TrainConfig, batches: BatchSource) -> float:
        """The part of the budget that is spent, 0 to 1; of several budgets, the one nearest to its end."""
        parts = [0.0]
        if config.steps is not None:
            parts.append(self.step / config.steps)
        if config.minutes is not None:
            parts.append(self.seconds / max(60 * config.minutes - self.reserve, 1e-9))
        if config.epochs is not None:
            within = self.batch / max(batches.batches_in(self.epoch), 1) if self.batch else 0.0
            parts.append((self.epoch + within) / config.epochs)
        return min(max(parts), 1.0)


@dataclass(frozen=True)
class Result:
    """How a run ended: `reason` is "steps", "epochs", "minutes", "patience" or "interrupted"; seconds in all.

    signal: the one that interrupted this process, such as `signal.SIGTERM`; None where none did.
    """

    reason: str
    step: int
    epoch: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
    best_value: float | None
    best: Path | None
    signal: int | None = None
