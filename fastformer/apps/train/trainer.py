"""`Trainer`: the one training loop, for translation and for language models.

The loop knows nothing of the task: it takes batches, a function that sums a batch's loss over its real tokens, and a
function that validates. What happens within a step is in `update.py`.

The host waits for the device only where a number is written down (every `log_every` steps): loss and gradient norm are
summed on the device until then. On the CPU, where looking is free, a loss that is not finite stops the run before it
reaches the weights; on a GPU at the next record, and always before a checkpoint is written.

A resumed run continues bit for bit (on the CPU, with a budget in steps or epochs): the state holds the position in the
data, the generators and the sums since the last record. Validation draws from generators that are put back afterwards,
so validating more or less often, saving by time, and being interrupted, change nothing. A budget in minutes depends on
the clock: the run ends early enough to validate once more (`time_budget.py`).

Under torchrun each process takes its share of every batch (`processes.py`). Batches, steps and records stay those of
one process, so a run may be resumed with another number of processes. Process 0 validates and writes, the others wait.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.system.run_lock import locked
from fastformer.apps.train.batch_source import BatchSource
from fastformer.apps.train.checkpoint import Checkpoint, average_checkpoints
from fastformer.apps.train.checkpoint_folder import INTERIM, CheckpointFolder
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.interrupt import Interrupt
from fastformer.apps.train.metrics import JSONL, MetricsLog, RunningSums, read_metrics
from fastformer.apps.train.position import Position, Result
from fastformer.apps.train.processes import ProcessError, Processes
from fastformer.apps.train.progress import Progress, describe
from fastformer.apps.train.randomness import random_state, seed_everything, set_random_state
from fastformer.apps.train.saving import CheckpointWriter
from fastformer.apps.train.schedules import Schedule
from fastformer.apps.train.states import check_settings
from fastformer.apps.train.thread_choice import ThreadChoice, check_threads
from fastformer.apps.train.time_budget import TimeBudget
from fastformer.apps.train.validation import Validator, is_better
from fastformer.apps.train.weights import put_weights

# Gradients that overflow in fp16 with a smaller scale than this have diverged.
_LOWEST_SCALE = 1.0


class DivergedError(FloatingPointError):
    """The loss or the gradient is not finite; the last good checkpoint is untouched."""


class Trainer:
    """Trains `model` in a run folder: `checkpoints/`, `metrics.jsonl`, `metrics.csv`.

    loss(model, batch): the loss summed over the batch's real tokens, a scalar tensor with gradient.
    batches: a `BatchSource`. validate(model): {"loss": mean per token, "bleu": …} in eval mode without gradients;
    "perplexity" is added from "loss" when absent, and a text "bleu_signature" is logged beside "bleu". A `Validation`
    is made smaller where it would take more than a tenth of a budget in minutes; any other function is called as it is.
    config: `TrainConfig`. architecture: the model's configuration (dataclass or mapping), stored in each checkpoint and
    compared on resuming; None: `model.config`, where that is a dataclass. The device is that of the parameters.
    clock: seconds for budget, speed, saves and progress, instead of the clocks that the configuration names.

    Within `join_processes`, all processes make the same Trainer and call the same methods.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        batches: BatchSource,
        config: TrainConfig,
        folder: Path | str,
        *,
        validate: Callable[[Any], Mapping[str, float | str]] | None = None,
        architecture: Any = None,
        show: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        check_threads(config.threads)
        self.model, self.config, self.folder = model, config, Path(folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.keep)
        self.device = next(model.parameters()).device
        if architecture is None and is_dataclass(getattr(model, "config", None)):
            architecture = model.config
        self._batches, self._architecture = batches, architecture
        self._processes = Processes.current()
        self._clock = clock or (time.process_time if config.clock == "cpu" else time.monotonic)
        self._wall_clock = clock or time.monotonic
        self._progress = Progress(show and self._processes.is_main, clock=self._wall_clock)
        self._update = new_update(model, loss, config, self._processes, getattr(batches, "longest", None))
        self._validator = validate and Validator(validate, model, self._update, self._processes, config.metric)
        self._time = TimeBudget(config, validate is not None)
        self._writer = CheckpointWriter(self.checkpoints, model, self._update, self._processes, architecture)
        self._schedule = Schedule(
            config.schedule, config.lr, config.warmup_steps, config.min_lr,
            config.plateau_factor, config.plateau_patience, config.plateau_divisor,
        )  # fmt: skip
        self._at = Position()
        self._start = 0.0
        self._sums = RunningSums(self.device, skips=config.precision == "fp16")
        self._metrics: dict[str, float] = {}
        self._saved_step, self._saved_interim = -1, False
        self._save_at = 0.0  # by the wall clock
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        seed_everything(self._processes.seed(config.seed))

    def resume(self, path: Path | str | None = None, fallback: bool = False) -> Checkpoint:
        """Continue from a checkpoint of this run, the last one by default; call it before `fit`.

        A damaged checkpoint raises CheckpointError naming the previous good one; `fallback` takes that one instead.
        """
        checkpoint = Checkpoint.open(self._processes.on_main(lambda: self._good_checkpoint(path, fallback)))
        checkpoint.check_architecture(self._architecture)
        state = checkpoint.state(self._update.parameters, checked=True)
        check_settings(state, checkpoint.step, self.config, checkpoint.path)
        checkpoint.load_into(self.model, self._architecture, checked=True)
        self._update.load_state_dict(state["optimizer"], state.get("scaler", {}))
        self._schedule.load_state_dict(state["schedule"])
        self._sums.load_state_dict(state["sums"])
        self._at = Position(**state["position"])
        self._metrics, self._saved_step = dict(checkpoint.metrics), checkpoint.step
        self._saved_interim = checkpoint.path.name == INTERIM
        self._processes.on_main(lambda: self._mark_again(checkpoint.path))
        generators = [state["random"], *state.get("random_of_others", [])]
        if self._processes.rank < len(generators):
            set_random_state(generators[self._processes.rank])
        else:  # a process that the run did not have before
            seed_everything(self._processes.seed(self.config.seed, checkpoint.step))
        return checkpoint

    @property
    def ended(self) -> str | None:
        """The budget that is used up already, so that `fit` would not train; None if it would."""
        return self._at.end(self.config)

    def _good_checkpoint(self, path: Path | str | None, fallback: bool) -> Path:
        with locked(self.folder):
            self.checkpoints.recover()
            return self.checkpoints.open(path, fallback).path

    def _mark_again(self, path: Path) -> None:
        """Of a checkpoint that was the best so far: who wrote it may have been killed before the index said so."""
        value = self._at.best_value
        if value is not None and self._metrics.get(self.config.metric) == value:
            if path.parent == self.checkpoints.folder:
                with locked(self.folder):
                    self._mark_if_best(path, value)

    def fit(self) -> Result:
        """Train until a budget is spent, patience ends or Ctrl-C, then validate and save; gives back how it ended.

        The first Ctrl-C finishes the step, saves, validates and returns; the second raises KeyboardInterrupt at once.
        SIGTERM and SIGHUP are taken as a first Ctrl-C, where nobody else handles or ignores them. Raises DivergedError
        for a loss or gradient that is not finite, OSError when a checkpoint cannot be written, RunLockedError while
        another process writes to the folder.
        """
        with ExitStack() as stack:
            self._processes.on_main(lambda: self._enter(stack))
            return self._fit()

    def _enter(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(self.folder))

    def _fit(self) -> Result:
        if self.ended and self._processes.on_main(self._is_complete):
            self._progress.line(f"nothing to train: {self.ended} ended this run at step {self._at.step:,}")
            return self._result(self.ended, None)
        if self._saved_step < 0 and self.checkpoints.paths():  # a run may have ended, and been resumed, at step 0
            raise ValueError(f"folder={self.folder} already holds checkpoints; resume from them or choose another")
        self._log = None
        if self._processes.is_main:
            self._log = MetricsLog(self.folder, self._at.records, self.config.tensorboard)
        self._processes.wait()
        self._start = self._clock() - self._at.seconds
        self._sums.start(self._clock())
        self._save_at = self._wall_clock() + 60 * self.config.save_minutes
        self._threads = ThreadChoice(self.config, self.device.type == "cpu" and self._processes.world == 1)
        notice = "finishing this step, then saving and validating; press Ctrl-C again to stop at once"
        self.model.train()
        self._update.optimizer.zero_grad()  # of a step that an error ended, or of the caller's own
        try:
            with self._progress, Interrupt(lambda: self._progress.line(notice)) as self._interrupt:
                saves = f"saved every {self.config.save_minutes:g} minutes and with each validation"
                self._progress.line(f"training begins: {self.config.end}; {saves}")
                reason = self._run()
                self._finish(reason)
        finally:
            self._threads.close()
            if self._log is not None:
                self._log.close()
        return self._result(reason, self._interrupt.signal)

    def _result(self, reason: str, signal: int | None) -> Result:
        best, value, at = self.checkpoints.best(), self.checkpoints.best_value(), self._at
        return Result(reason, at.step, at.epoch, at.tokens, at.seconds, self._metrics, value, best, signal)

    def _is_complete(self) -> bool:
        """Whether all that `_finish` saves, records and marks is there already."""
        wanted = {"validation"} if self._validator is not None else set()
        wanted |= {"average"} if self.config.average > 1 else set()
        if self._saved_step != self._at.step or self._saved_interim or not (self.folder / JSONL).is_file():
            return False
        found = [each for each in read_metrics(self.folder) if each["step"] == self._at.step]
        metric, best = self.config.metric, self.checkpoints.best_value()
        values = [each.get(metric) for each in found if each.get("kind") in wanted]
        marked = not any(isinstance(value, float) and is_better(metric, value, best) for value in values)
        return marked and wanted <= {each.get("kind") for each in found}

    def load_best(self) -> Checkpoint:
        """Put the weights of the best checkpoint (the last one when none was validated) into the model."""
        checkpoint = self.checkpoints.open(self.checkpoints.best_or_last())
        checkpoint.load_into(self.model, self._architecture)
        return checkpoint

    def _run(self) -> str:
        if self._at.validation_due and not self._validate_and_save():
            return "patience"
        while (reason := self._end()) is None:
            batches = iter(self._batches.epoch(self._at.epoch, self._at.batch))
            while group := list(islice(batches, self.config.accumulate)):
                self._step(group)
                self._report()
                due = self.config.validate_every is not None and self._at.step % self.config.validate_every == 0
                if due and not self._validate_and_save():
                    return "patience"
                if (reason := self._end()) is not None:
                    return reason
            if self._at.batch == 0:
                raise ValueError(f"batches: epoch {self._at.epoch} has no batch")
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0
            self._check_finite(self._at.step)
            mean = self._write("epoch", self._sums.take_epoch())
            goes_on = self.config.validate_every is not None or self._validate_and_save()
            self._show(mean)
            if not goes_on:
                return "patience"
        return reason

    def _end(self) -> str | None:
        """Decide with the other processes whether the run ends here; save and measure if it is time for that."""
        seconds, reserve = self._clock() - self._start, self._time.reserve(self._at.share)
        due = self._at.step > max(self._saved_step, 0) and self._wall_clock() >= self._save_at
        (self._at.seconds, self._at.reserve, save), interrupted = self._processes.agree(
            (seconds, self._at.reserve if reserve is None else reserve, float(due)), self._interrupt.requested
        )
        reason = "interrupted" if interrupted else self._at.end(self.config)
        measure = self._time.must_measure(self._at.seconds)
        if reason is None and (save or measure):
            paused = self._clock()
            if save or self._saved_step < 0:
                self._save_interim()
            if measure:
                self._measure_validation()
            self._sums.pause(self._clock() - paused)
        return reason

    def _step(self, batches: list[Any]) -> None:
        started = self._clock()
        rate = self._schedule.rate(self._at.step + 1, self._at.spent(self.config, self._batches))
        loss, norm, tokens = self._update.gradients(batches)
        self._sums.add(loss, norm, tokens, rate)
        if self.device.type == "cpu":
            self._check_finite(self._at.step + 1)
        self._update.apply(norm, rate)
        self._at.step += 1
        self._at.batch += len(batches)
        self._at.tokens += tokens
        seconds = self._clock() - started
        self._time.step_took(seconds)
        self._threads.step(tokens, seconds)

    def _check_finite(self, step: int) -> None:
        scale = self._update.loss_scale
        if self._sums.finite() and (scale is None or scale >= _LOWEST_SCALE):
            return
        last = self.checkpoints.last()
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        scaled = "" if scale is None else f", loss scale {scale:g}"
        raise DivergedError(
            f"loss or gradient is not finite at step {step} (lr {self._sums.rate:.2e}{scaled}); {kept}; "
            "try a lower lr, more warmup_steps or a lower clip_norm"
        )

    def _report(self) -> None:
        """Write a record every `log_every` steps, and show the progress by time."""
        if self._at.step % self.config.log_every == 0:
            self._check_finite(self._at.step)
            values, scale = self._sums.take(self._clock()), self._update.loss_scale
            record = self._write("train", values if scale is None else {**values, "loss_scale": scale})
        elif self._progress.due():
            record = {"step": self._at.step, "epoch": self._epoch(), **self._sums.values(self._clock())}
        else:
            return
        if record is not None:
            spent = self._at.spent(self.config, self._batches)
            left = self._at.seconds * (1 - spent) / spent if spent else math.inf
            self._progress.step(record, spent, left)

    def _validate_and_save(self) -> bool:
        """Validate and save as the configuration asks for; False when patience is at its end."""
        self._check_finite(self._at.step)
        paused, best, shown = self._clock(), None, None
        if self._validator is not None:
            self._at.validation_due = True
            if self._saved_step < 0:
                self._save_interim()
            value, shown = self._evaluate("validation")
            if is_better(self.config.metric, value, self._at.best_value):
                self._at.best_value, self._at.worse, best = value, 0, value
            else:
                self._at.worse += 1
            if "loss" in self._metrics:
                self._schedule.observe(self._metrics["loss"])
        self._at.validation_due = False
        self._save(best)
        self._show(shown, best is not None)
        self._sums.pause(self._clock() - paused)
        return self.config.patience is None or self._at.worse < self.config.patience

    def _evaluate(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        """Validate and record the values; gives back the one that decides, and the record to show.

        Where that fails, what was trained is saved before the error goes on.
        """
        assert self._validator is not None
        try:
            self._measure_validation()
            started = self._clock()
            self._metrics = self._validator.values(self._at.share)
            self._time.validation_took(self._clock() - started, self._at.share)
        except Exception as error:
            self._metrics = {}
            together = not isinstance(error, ProcessError) or error.reported  # else another one is gone
            if together and self._saved_step != self._at.step:
                self._save(None)
            raise
        share = {} if self._at.share == 1 else {"validated_share": self._at.share}
        return self._metrics[self.config.metric], self._write(kind, {**self._metrics, **share})

    def _measure_validation(self) -> None:
        """With a budget in minutes, find out what share of the held-out data can be validated, once in a run."""
        seconds = self._time.trial_seconds
        if self._time.knows_validation or seconds is None or self._validator is None or not self._validator.reducible:
            return
        held_out = self._validator.reducible
        self._time.validation_took(*self._validator.trial(seconds, self._clock))
        if self._at.best_value is None and (share := self._time.share()) < self._at.share:
            self._at.share = share
            self._progress.line(
                f"validation: on {held_out.count(share):,} of {held_out.size:,}, because all would take more than a "
                "tenth of --minutes; `fastformer evaluate` scores them all"
            )

    def _show(self, record: dict[str, Any] | None, best: bool = False) -> None:
        """Show a record, once what it tells is saved; a process that writes no record shows none."""
        if record is not None:
            kind = "mean of training" if record["kind"] == "epoch" else record["kind"]
            self._progress.line(f"{kind}: {describe(record)}" + ("  best so far, saved" if best else ""))

    def _write(self, kind: str, values: Mapping[str, float]) -> dict[str, Any] | None:
        """Write a record and give it back; None in a process that does not write."""
        if self._log is None:
            return None
        self._at.seconds = self._clock() - self._start
        record = self._log.write(kind, self._at.step, epoch=self._epoch(), seconds=self._at.seconds, **values)
        if kind in ("train", "epoch"):  # validations are those of a checkpoint, or of an end that need not be one
            self._at.records = self._log.count
        return record

    def _epoch(self) -> int:
        """The epoch for people: counted from 1; between two epochs the former."""
        return self._at.epoch + (self._at.batch > 0)

    def _save_interim(self) -> None:
        """Save so that little is lost if the process is killed, in a place that the next checkpoint takes."""
        self._check_finite(self._at.step)
        self._metrics = {}
        self._save(None, INTERIM)

    def _save(self, best: float | None, name: str | None = None) -> None:
        started = self._clock()
        if self._log is not None:
            self._at.seconds, self._at.records = self._clock() - self._start, self._log.count
        generators = self._processes.gather(random_state())
        state = {
            "optimizer_name": self.config.optimizer,
            "schedule_name": self.config.schedule,
            "metric": self.config.metric,
            "scaler": self._update.scaler_state(),
            "schedule": self._schedule.state_dict(),
            "sums": self._sums.state_dict(self._clock()),
            "position": dict(vars(self._at)),
            "random": next(iter(generators), None),
            "random_of_others": generators[1:],
        }
        self._write_checkpoint(state, best, name)
        self._saved_step, self._saved_interim = self._at.step, name == INTERIM
        self._save_at = self._wall_clock() + 60 * self.config.save_minutes
        self._time.save_took(self._clock() - started)

    def _write_checkpoint(self, state: dict[str, Any] | None, best: float | None, name: str | None = None) -> None:
        self._writer.save(self._at.step, state, self._metrics, best, name, self.config.sharded_checkpoints)

    def _finish(self, reason: str) -> None:
        """Save and validate the end of the run, without a trace in the saved state: a longer run goes on from there."""
        if self._saved_step != self._at.step or self._saved_interim:
            self._check_finite(self._at.step)
            self._metrics = {}
            self._save(None)
        # Also where a run that ended, or was killed right here, is resumed without a longer budget.
        if self._validator is not None and not self._metrics:
            value, shown = self._evaluate("validation")
            best = self._processes.on_main(lambda: self._mark_if_best(self.checkpoints.last(), value))
            self._show(shown, best)
        if self.config.average > 1 and reason != "interrupted":
            self._average()
        self._progress.line(f"ended at step {self._at.step:,}: {reason}")

    def _mark_if_best(self, path: Path | None, value: float) -> bool:
        if path is None or not is_better(self.config.metric, value, self.checkpoints.best_value()):
            return False
        self.checkpoints.mark_best(path, value)
        return True

    def _average(self) -> None:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        averaged = average_checkpoints(self.checkpoints.paths()[-self.config.average :])
        metrics, best, shown = self._metrics, None, None
        try:
            put_weights(self.model, averaged, self.checkpoints.folder)
            if self._validator is not None:
                value, shown = self._evaluate("average")
                best = value if is_better(self.config.metric, value, self.checkpoints.best_value()) else None
            self._write_checkpoint(None, best)
        finally:
            put_weights(self.model, weights, self.checkpoints.folder)
            self._metrics = metrics
        self._show(shown, best is not None)
