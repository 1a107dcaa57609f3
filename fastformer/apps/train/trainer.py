"""`Trainer`: the training loop of all models.

The loop is independent of the task: it takes batches, a function that sums a batch's loss over its real tokens, and a
function that validates. `update.py` makes a step, `run_state.py` saves and resumes, `records.py` writes and shows
metrics, and `time_budget.py` decides how much time a budget in minutes leaves for validation. Under torchrun each
process takes its share of every batch (`processes.py`); process 0 validates and writes.

The host waits for the device only for a record (every `log_every` steps). On a CPU a loss that is not finite stops the
run before it reaches the weights; on a GPU at the next record, and before a checkpoint is written.
"""

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
from fastformer.apps.train.checkpoint import Checkpoint
from fastformer.apps.train.checkpoint_folder import INTERIM
from fastformer.apps.train.config import TrainConfig, check_threads
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.interrupt import Interrupt
from fastformer.apps.train.metrics import RunningSums, is_better
from fastformer.apps.train.processes import ProcessError, Processes
from fastformer.apps.train.randomness import seed_everything
from fastformer.apps.train.records import Records
from fastformer.apps.train.run_state import Position, Result, RunState
from fastformer.apps.train.schedules import Schedule
from fastformer.apps.train.time_budget import TimeBudget
from fastformer.apps.train.validation import Evaluation
from fastformer.apps.train.weights import put_weights

_NOTICE = "finishing this step, then saving and validating; press Ctrl-C again to stop at once"


class Trainer:
    """Trains `model` in a run folder: `checkpoints/`, `metrics.jsonl`, `metrics.csv`.

    loss(model, batch): the loss summed over the batch's real tokens, a scalar tensor with gradient.
    batches: a `BatchSource`. validate(model): {"loss": mean per token, "bleu": …} in eval mode without gradients;
    "perplexity" is added from "loss" when absent, and a text "bleu_signature" is logged beside "bleu". A `Validation`
    scores fewer examples if it would take over a tenth of a budget in minutes; any other function is called as it is.
    config: `TrainConfig`. architecture: the model's configuration (dataclass or mapping), stored in each checkpoint and
    compared on resuming; None: `model.config`, if it is a dataclass. The device is that of the parameters.
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
        if architecture is None and is_dataclass(getattr(model, "config", None)):
            architecture = model.config
        self.model, self.config, self.folder = model, config, Path(folder)
        self.device = next(model.parameters()).device
        self._batches, self._architecture = batches, architecture
        self._processes = processes = Processes.current()
        self._clock = clock or (time.process_time if config.clock == "cpu" else time.monotonic)
        self._wall_clock = clock or time.monotonic
        self._update = new_update(model, loss, config, processes, getattr(batches, "longest", None))
        self._schedule = Schedule(
            config.schedule, config.lr, config.warmup_steps, config.min_lr,
            config.plateau_factor, config.plateau_patience, config.plateau_divisor,
        )  # fmt: skip
        self._sums = RunningSums(self.device, skips=config.precision == "fp16")
        self._state = RunState(
            self.folder, config, model, self._update, self._schedule, self._sums, processes, architecture
        )
        self.checkpoints = self._state.checkpoints
        self._records = Records(
            self.folder, config, self._state, batches, processes, show, self._seconds, self._wall_clock
        )
        self._time, self._evaluation = TimeBudget(config, validate is not None), None
        if validate is not None:
            self._evaluation = Evaluation(
                validate, model, self._update, processes, self._state, self._records, self._time, config.metric,
                self._clock,
            )  # fmt: skip
        self._start, self._save_at = 0.0, 0.0  # by the clock, by the wall clock
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        seed_everything(processes.seed(config.seed))

    @property
    def ended(self) -> str | None:
        """The budget that is used up already, so that `fit` would not train; None if it would."""
        return self._at.end(self.config)

    @property
    def _at(self) -> Position:
        return self._state.at

    def resume(self, path: Path | str | None = None) -> Checkpoint:
        """Continue from a checkpoint of this run, the last one by default; call it before `fit`.

        A damaged checkpoint raises CheckpointError naming the previous good one.
        """
        return self._state.restore(path)

    def load_best(self) -> Checkpoint:
        """Put the weights of the best checkpoint (the last one when none was validated) into the model."""
        checkpoint = self.checkpoints.open(self.checkpoints.best_or_last())
        checkpoint.load_into(self.model, self._architecture)
        return checkpoint

    def fit(self) -> Result:
        """Train until a budget is spent, patience ends or Ctrl-C, then validate and save; return how it ended.

        The first Ctrl-C finishes the step, saves, validates and returns; the second raises KeyboardInterrupt at once.
        SIGTERM and SIGHUP count as a first Ctrl-C, unless the program handles or ignores them. Raises DivergedError
        for a loss or gradient that is not finite, OSError when a checkpoint cannot be written, RunLockedError while
        another process writes to the folder.
        """
        with ExitStack() as stack:
            self._processes.on_main(lambda: self._lock(stack))
            if self._state.saved_step < 0 and self.checkpoints.paths():  # a run may have ended at step 0
                raise ValueError(f"folder={self.folder} already holds checkpoints; resume from them or choose another")
            stack.callback(self._records.close)
            self._begin()
            progress = stack.enter_context(self._records.progress)
            self._interrupt = stack.enter_context(Interrupt(lambda: progress.line(_NOTICE)))
            saves = f"saved every {self.config.save_minutes:g} minutes and with each validation"
            progress.line(f"training begins: {self.config.end}; {saves}")
            reason = self._train()
            self._finish(reason)
            return self._state.result(reason, self._interrupt.signal)

    def _lock(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(self.folder))

    def _begin(self) -> None:
        self._records.open()
        self._processes.wait()
        self._start = self._clock() - self._at.seconds
        self._sums.start(self._clock())
        self._save_at = self._wall_clock() + 60 * self.config.save_minutes
        self.model.train()
        self._update.optimizer.zero_grad()  # drops gradients of a step that an error ended, or of the caller

    def _train(self) -> str:
        """Train until the run ends, and return the reason."""
        if self._at.validation_due and not self._validate_and_save():
            return "patience"
        while (reason := self._end()) is None:
            batches = iter(self._batches.epoch(self._at.epoch, self._at.batch))
            while group := list(islice(batches, self.config.accumulate)):
                self._step(group)
                self._records.report(lambda: self._update.loss_scale, self._clock)
                due = self.config.validate_every is not None and self._at.step % self.config.validate_every == 0
                if due and not self._validate_and_save():
                    return "patience"
                if (reason := self._end()) is not None:
                    return reason
            if self._at.batch == 0:
                raise ValueError(f"batches: epoch {self._at.epoch} has no batch")
            self._at.epoch, self._at.batch = self._at.epoch + 1, 0
            self._state.check_finite(self._at.step)
            mean = self._records.write("epoch", self._sums.take_epoch())
            goes_on = self.config.validate_every is not None or self._validate_and_save()
            self._records.show(mean)
            if not goes_on:
                return "patience"
        return reason

    def _step(self, batches: list[Any]) -> None:
        """Make one step of the optimizer."""
        started = self._clock()
        rate = self._schedule.rate(self._at.step + 1, self._at.spent(self.config, self._batches))
        loss, norm, tokens = self._update.gradients(batches)
        self._sums.add(loss, norm, tokens, rate)
        if self.device.type == "cpu":
            self._state.check_finite(self._at.step + 1)
        self._update.apply(norm, rate)
        self._at.step += 1
        self._at.batch += len(batches)
        self._at.tokens += tokens
        self._time.step_took(self._clock() - started)

    def _end(self) -> str | None:
        """Decide with the other processes whether the run ends here; save and measure if it is time for that."""
        seconds, reserve = self._seconds(), self._time.reserve(self._at.share)
        due = self._at.step > max(self._state.saved_step, 0) and self._wall_clock() >= self._save_at
        (self._at.seconds, self._at.reserve, save), interrupted = self._processes.agree(
            (seconds, self._at.reserve if reserve is None else reserve, float(due)), self._interrupt.requested
        )
        reason = "interrupted" if interrupted else self._at.end(self.config)
        measure = self._time.must_measure(self._at.seconds)
        if reason is None and (save or measure):
            paused = self._clock()
            if save or self._state.saved_step < 0:
                self._save_unrated(INTERIM)
            if measure and self._evaluation is not None:
                self._evaluation.measure()
            self._sums.pause(self._clock() - paused)
        return reason

    def _validate_and_save(self) -> bool:
        """Validate and save as the configuration asks for; return False if `patience` is used up."""
        self._state.check_finite(self._at.step)
        paused, best, record = self._clock(), None, None
        if self._evaluation is not None:
            self._at.validation_due = True
            if self._state.saved_step < 0:
                self._save_unrated(INTERIM)
            value, record = self._evaluate("validation")
            if is_better(self.config.metric, value, self._at.best_value):
                self._at.best_value, self._at.worse, best = value, 0, value
            else:
                self._at.worse += 1
            if "loss" in self._state.metrics:
                self._schedule.observe(self._state.metrics["loss"])
        self._at.validation_due = False
        self._save(best)
        self._records.show(record, best is not None)
        self._sums.pause(self._clock() - paused)
        return self.config.patience is None or self._at.worse < self.config.patience

    def _evaluate(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        """Validate as `Evaluation.run`; if that fails, save the training so far before raising the error."""
        assert self._evaluation is not None
        try:
            return self._evaluation.run(kind)
        except Exception as error:
            self._state.metrics = {}
            all_here = not isinstance(error, ProcessError) or error.reported  # else another process has ended
            if all_here and self._state.saved_step != self._at.step:
                self._save(None)
            raise

    def _save_unrated(self, name: str | None = None) -> None:
        """Save weights that were not validated; the next checkpoint replaces one named INTERIM."""
        self._state.check_finite(self._at.step)
        self._state.metrics = {}
        self._save(None, name)

    def _save(self, best: float | None, name: str | None = None) -> None:
        started = self._clock()
        self._records.count()
        self._state.save(started, best, name)
        self._save_at = self._wall_clock() + 60 * self.config.save_minutes
        self._time.save_took(self._clock() - started)

    def _finish(self, reason: str) -> None:
        """Save and validate at the end; the saved state is that before the validation, as a longer run needs it."""
        if self._state.saved_step != self._at.step or self._state.saved_interim:
            self._save_unrated()
        # Also if a run that ended, or was killed at this point, is resumed without a longer budget.
        if self._evaluation is not None and not self._state.metrics:
            value, record = self._evaluate("validation")
            best = self._processes.on_main(lambda: self._state.mark_if_best(self.checkpoints.last(), value))
            self._records.show(record, best)
        if self.config.average > 1 and reason != "interrupted":
            self._average()
        self._records.progress.line(f"ended at step {self._at.step:,}: {reason}")

    def _average(self) -> None:
        """Validate and save the average of the last checkpoints; the model keeps its weights."""
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        metrics, best, record = self._state.metrics, None, None
        try:
            self._state.load_average()
            if self._evaluation is not None:
                value, record = self._evaluate("average")
                best = value if is_better(self.config.metric, value, self.checkpoints.best_value()) else None
            self._state.save_average(best)
        finally:
            put_weights(self.model, weights, self.checkpoints.folder)
            self._state.metrics = metrics
        self._records.show(record, best is not None)

    def _seconds(self) -> float:
        return self._clock() - self._start
