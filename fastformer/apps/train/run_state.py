"""`RunState`: save and resume a run, bit for bit on a CPU. `Result`: how a run ended.

A checkpoint holds the model, the optimizer, the schedule, the loss scale, the position in the data, the sums since the
last record, and the random generators of each process.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pydantic.dataclasses
from torch import nn

from fastformer.apps.system.run_lock import locked
from fastformer.apps.train.checkpoint import Checkpoint, CheckpointError
from fastformer.apps.train.checkpoint_folder import INTERIM, CheckpointFolder
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.metrics import RunningSums
from fastformer.apps.train.parallel import whole_tensors, whole_weights
from fastformer.apps.train.processes import ProcessError, Processes
from fastformer.apps.train.randomness import random_state, seed_everything, set_random_state
from fastformer.apps.train.schedules import Schedule
from fastformer.apps.train.update import Update

# A run has diverged if gradients overflow in fp16 with a smaller scale than this.
_LOWEST_SCALE = 1.0


class DivergedError(FloatingPointError):
    """The loss or the gradient is not finite; the last good checkpoint is untouched."""


class BatchSource(Protocol):
    """The training data. The batches of an epoch must depend on its number only, not on global generators.

    A batch has `tokens`, the number of real tokens that its loss is summed over, and `to(device, non_blocking)`.
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
        in_epoch = self.batch / max(batches.batches_in(self.epoch), 1) if self.batch and config.epochs else 0.0
        in_steps, in_epochs = (
            self.step / (config.steps or math.inf),
            (self.epoch + in_epoch) / (config.epochs or math.inf),
        )
        in_minutes = self.seconds / max(60 * config.minutes - self.reserve, 1e-9) if config.minutes else 0.0
        return min(max(in_steps, in_epochs, in_minutes), 1.0)


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


@dataclass
class RunState:
    """Saves and restores a run of `model`; all processes call the same methods.

    metrics: of the last validation; empty if the weights were trained since. saved_step: of the last checkpoint; -1
    before the first. saved_interim: whether the next checkpoint replaces it.
    """

    checkpoints: CheckpointFolder
    config: TrainConfig
    model: nn.Module
    update: Update
    schedule: Schedule
    sums: RunningSums
    processes: Processes
    architecture: Any
    at: Position = field(default_factory=Position)
    metrics: dict[str, Any] = field(default_factory=dict)
    saved_step: int = -1
    saved_interim: bool = False

    def save(self, now: float, best: float | None = None, interim: bool = False) -> None:
        """Write a checkpoint at the time `now` of the sums' clock; `best` is the metric's value if it is the best."""
        state = {
            "optimizer_name": self.config.optimizer,
            "schedule_name": self.config.schedule,
            "metric": self.config.metric,
            "scaler": self.update.scaler_state(),
            "schedule": self.schedule.state_dict(),
            "sums": self.sums.state_dict(now),
            "position": dataclasses.asdict(self.at),
            "random": self.processes.gather(random_state()),
            "optimizer": whole_tensors(self.update.optimizer.state_dict()["state"], self.processes),
        }
        self.write(state, best, interim)
        self.saved_step, self.saved_interim = self.at.step, interim

    def write(self, state: dict[str, Any] | None, best: float | None, interim: bool = False) -> None:
        """Write the model's weights with a state, or without one as the average."""
        values = self.at.step, whole_weights(self.model, self.processes), state, self.architecture, self.metrics
        self.processes.on_main(lambda: self.checkpoints.save(*values, best, interim))

    def restore(self) -> Checkpoint:
        """Continue from the last checkpoint; see `Trainer.resume`."""

        def last_checkpoint() -> Path:
            with locked(self.checkpoints.folder.parent):
                return self.checkpoints.open().path

        checkpoint = Checkpoint.open(self.processes.on_main(last_checkpoint))
        checkpoint.check_architecture(self.architecture)
        state = checkpoint.state()
        try:
            numbers = [value for name in ("schedule", "sums") for value in state[name].values()]
            if not all(isinstance(number, int | float | None) for number in numbers):
                raise TypeError("a value is not a number")
            at = Position(**{each.name: state["position"][each.name] for each in dataclasses.fields(Position)})
            for name in ("optimizer_name", "schedule_name", *(("metric",) if at.best_value is not None else ())):
                setting = name.removesuffix("_name")
                if state[name] != getattr(self.config, setting):
                    raise CheckpointError(
                        f"{checkpoint.path}: was trained with {setting}={state[name]}, not "
                        f"{getattr(self.config, setting)}"
                    )
            optimizer = checkpoint.optimizer_state(self.update.parameters, self.config.optimizer)
            checkpoint.load_into(self.model)
            self.update.load_state_dict(optimizer, state["scaler"])
            self.schedule.load_state_dict(state["schedule"])
            self.sums.load_state_dict(state["sums"])
            if self.processes.rank < len(state["random"]):
                set_random_state(state["random"][self.processes.rank])
            else:  # a process that the run did not have before
                seed_everything(self.processes.seed(self.config.seed, checkpoint.step))
        except (CheckpointError, ProcessError):
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            cause = " ".join(str(error).split())[:120]
            raise CheckpointError(
                f"{checkpoint.path}: not a state of this run ({type(error).__name__}: {cause})"
            ) from None
        self.at, self.metrics = at, dict(checkpoint.metrics)
        self.saved_step, self.saved_interim = at.step, checkpoint.path.name.startswith(INTERIM)
        return checkpoint

    def check_finite(self, step: int) -> None:
        """Raise DivergedError if the loss or the gradient of a step so far was not finite; waits for the device."""
        scale = self.update.loss_scale
        if self.sums.finite() and (scale is None or scale >= _LOWEST_SCALE):
            return
        last = self.checkpoints.last()
        last_good = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        scaled = "" if scale is None else f", loss scale {scale:g}"
        raise DivergedError(
            f"loss or gradient is not finite at step {step} (lr {self.sums.rate:.2e}{scaled}); {last_good}; "
            "try a lower lr, more warmup_steps or a lower clip_norm"
        )
