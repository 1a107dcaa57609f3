"""`Trainer`: the training loop of all models.

`update.py` makes a step, `validation.py` decides how much time a budget in minutes leaves for validation. Under
torchrun each process takes its share of every batch (`processes.py`); process 0 validates and writes.

A checkpoint holds the model, the optimizer, the schedule, the loss scale, the position in the data, the sums since the
last record, and the random generators of each process, so that a run resumes bit for bit on a CPU.

The host waits for the device only for a record (every `log_every` steps). On a CPU a loss that is not finite stops the
run before it reaches the weights; on a GPU at the next record, and before a checkpoint is written.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.apps.system.run_lock import locked
from fastformer.apps.train.checkpoint import Checkpoint, CheckpointError, average_checkpoints, put_weights
from fastformer.apps.train.checkpoint_folder import INTERIM, CheckpointFolder
from fastformer.apps.train.config import TrainConfig, check_machine
from fastformer.apps.train.graphs import new_update
from fastformer.apps.train.interrupt import interruptible
from fastformer.apps.train.metrics import MetricsLog, RunningSums, is_better
from fastformer.apps.train.parallel import unsharded_parameters, whole_tensors, whole_weights
from fastformer.apps.train.processes import ProcessError, Processes
from fastformer.apps.train.progress import Progress
from fastformer.apps.train.randomness import preserved_randomness, random_state, seed_everything, set_random_state
from fastformer.apps.train.run_state import ENDS, BatchSource, DivergedError, Position, Result
from fastformer.apps.train.schedules import Schedule
from fastformer.apps.train.validation import TimeBudget, Validation, check_values

# A run has diverged if gradients overflow in fp16 with a smaller scale than this.
_LOWEST_SCALE = 1.0
_NOTICE = "finishing this step, then saving and validating; press Ctrl-C again to stop at once"


class Trainer:
    """Trains `model` in a run folder: `checkpoints/`, `metrics.jsonl`, `metrics.csv`.

    loss(model, batch): the loss summed over the batch's real tokens, a scalar tensor with gradient.
    batches: a `BatchSource`. validate(model): {"loss": mean per token, "bleu": …} in eval mode without gradients;
    "perplexity" is added from "loss" when absent, and a text "bleu_signature" is logged beside "bleu". As the
    configuration's `metric`, "loss", "perplexity" and "word_perplexity" are better lower, all others higher. A
    `Validation` scores fewer examples if it would take over a tenth of a budget in minutes; any other function is
    called as it is.
    `model.config`, if it is a dataclass, is stored in each checkpoint and compared on resuming. clock: returns seconds,
    in place of the clocks of the configuration.

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
        show: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.model, self.config, self.folder = model, config, Path(folder)
        self.device = next(model.parameters()).device
        self._batches, self._validation = batches, validate
        self._processes = processes = Processes.current()
        check_machine(config, self.device, processes.world)
        architecture = getattr(model, "config", None)
        self._architecture = architecture if is_dataclass(architecture) else None
        self._clock = clock or (time.process_time if config.clock == "cpu" else time.monotonic)
        self._wall_clock = clock or time.monotonic
        self._update = new_update(model, loss, config, processes)
        self._schedule = Schedule(config)
        self._sums = RunningSums(self.device, skips=config.precision == "fp16")
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.keep)
        self._at = Position()
        self._metrics: dict[str, Any] = {}  # of the last validation; empty if the weights were trained since
        self._saved_step = -1  # of the last checkpoint; -1 before the first
        self._saved_interim = False  # whether the next checkpoint replaces the last one
        unit = getattr(batches, "unit", "tokens")
        self._progress = Progress(show and processes.is_main, clock=self._wall_clock, unit=unit)
        self._time = TimeBudget(config, validate is not None)
        self._log: MetricsLog | None = None  # open in process 0, while `fit` runs
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        seed_everything(processes.seed(config.seed))

    @property
    def ended(self) -> str | None:
        """The budget that is used up already, so that `fit` would not train; None if it would."""
        return self._at.end(self.config)

    def resume(self) -> Checkpoint:
        """Continue from the last checkpoint of this run; call it before `fit`. Raises CheckpointError naming a damaged
        file; without the folder of that checkpoint, the run continues from the one before it.
        """

        def last_checkpoint() -> Path:
            with locked(self.folder):
                return self.checkpoints.open().path

        checkpoint = Checkpoint.open(self._processes.on_main(last_checkpoint))
        checkpoint.check_architecture(self._architecture)
        state = checkpoint.state()
        try:
            numbers = [value for name in ("schedule", "sums") for value in state[name].values()]
            if not all(isinstance(number, int | float | None) for number in numbers):
                raise TypeError("a value is not a number")
            at = Position(**{each.name: state["position"][each.name] for each in fields(Position)})
            for name in ("optimizer_name", "schedule_name", *(("metric",) if at.best_value is not None else ())):
                setting = name.removesuffix("_name")
                if state[name] != getattr(self.config, setting):
                    raise CheckpointError(
                        f"{checkpoint.path}: was trained with {setting}={state[name]}, not "
                        f"{getattr(self.config, setting)}"
                    )
            optimizer = checkpoint.optimizer_state(self._update.parameters, self.config.optimizer)
            checkpoint.load_into(self.model)
            self._update.load_state_dict(optimizer, state["scaler"])
            self._schedule.load_state_dict(state["schedule"])
            self._sums.load_state_dict(state["sums"])
            if self._processes.rank < len(state["random"]):
                set_random_state(state["random"][self._processes.rank])
            else:  # a process that the run did not have before
                seed_everything(self._processes.seed(self.config.seed, checkpoint.step))
        except (CheckpointError, ProcessError):
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            cause = " ".join(str(error).split())[:120]
            raise CheckpointError(
                f"{checkpoint.path}: not a state of this run ({type(error).__name__}: {cause})"
            ) from None
        self._at, self._metrics = at, dict(checkpoint.metrics)
        self._saved_step, self._saved_interim = at.step, checkpoint.path.name.startswith(INTERIM)
        return checkpoint

    def fit(self) -> Result:
        """Train until a budget is spent, patience ends or the first Ctrl-C, then save and validate.

        Raises DivergedError for a loss or gradient that is not finite, OSError when a checkpoint cannot be written,
        RunLockedError while another process writes to the folder.
        """
        with ExitStack() as stack:
            self._processes.on_main(lambda: stack.enter_context(locked(self.folder)))
            if self._saved_step < 0 and self.checkpoints.paths():  # a run may have ended at step 0
                raise ValueError(f"folder={self.folder} already holds checkpoints; resume from them or choose another")
            if self._processes.is_main:
                self._log = MetricsLog(self.folder, self._at.records, self.config.tensorboard)
                stack.callback(self._log.close)
            self._processes.wait()
            self._start = self._clock() - self._at.seconds
            self._sums.start(self._clock())
            self._save_at = self._wall_clock() + 60 * self.config.save_minutes
            self.model.train()
            self._update.optimizer.zero_grad()  # drops gradients of a step that an error ended, or of the caller
            progress = stack.enter_context(self._progress)
            self._interrupted = stack.enter_context(interruptible(lambda: progress.line(_NOTICE)))
            saves = f"saved every {self.config.save_minutes:g} minutes and with each validation"
            if (ended := self.ended) is None:
                progress.line(f"training begins: {self.config.end}; {saves}")
            else:
                progress.line(f"nothing to train: {self._at.step:,} steps were made before; {ENDS[ended]}")
            reason = self._train()
            self._finish(reason)
            if ended is None:
                progress.line(f"training ends at step {self._at.step:,}: {ENDS[reason]}")
            at, best = self._at, (self.checkpoints.best_value(), self.checkpoints.best())
            return Result(reason, at.step, at.epoch, at.tokens, at.seconds, self._metrics, *best)

    def _train(self) -> str:
        """Train until the run ends, and return the reason."""
        config, at = self.config, self._at
        while (reason := self._end()) is None:
            batches = iter(self._batches.epoch(at.epoch, at.batch))
            while group := list(islice(batches, config.accumulate)):
                self._step(group)
                self._report()
                if config.validate_every is not None and at.step % config.validate_every == 0:
                    self._validate_and_save()
                if (reason := self._end()) is not None:
                    return reason
            if at.batch == 0:
                raise ValueError(f"batches: epoch {at.epoch} has no batch")
            at.epoch, at.batch = at.epoch + 1, 0
            self._check_finite(at.step)
            mean = self._write("epoch", self._sums.take_epoch())
            if config.validate_every is None:
                self._validate_and_save()
            self._progress.record(mean)
        return reason

    def _step(self, batches: list[Any]) -> None:
        """Make one step of the optimizer."""
        started, at = self._clock(), self._at
        rate = self._schedule.rate(at.step + 1, at.spent(self.config, self._batches))
        loss, norm, tokens = self._update.gradients(batches)
        self._sums.add(loss, norm, tokens, rate)
        if self.device.type == "cpu":
            self._check_finite(at.step + 1)
        self._update.apply(norm, rate)
        at.step, at.batch, at.tokens = at.step + 1, at.batch + len(batches), at.tokens + tokens
        self._metrics = {}
        self._time.step_took(self._clock() - started)

    def _end(self) -> str | None:
        """Decide with the other processes whether the run ends here; save and measure if it is time for that."""
        at, reserve = self._at, self._time.reserve(self._at.share, self._at.reserve)
        due = at.step > max(self._saved_step, 0) and self._wall_clock() >= self._save_at
        decisions = self._processes.agree((self._seconds(), reserve, float(due)), self._interrupted.is_set())
        (at.seconds, at.reserve, save), interrupted = decisions
        reason = "interrupted" if interrupted else at.end(self.config)
        if reason is None:
            paused = self._clock()
            if save:
                self._save(interim=True)
            if self._time.must_measure(at.seconds):
                self._measure()
            self._sums.pause(self._clock() - paused)
        return reason

    def _validate_and_save(self) -> None:
        self._check_finite(self._at.step)
        paused, at, best, record = self._clock(), self._at, None, None
        if self._validation is not None:
            value, record = self._validate("validation")
            at.worse += 1
            if is_better(self.config.metric, value, at.best_value):
                at.best_value, at.worse, best = value, 0, value
            if "loss" in self._metrics:
                self._schedule.observe(self._metrics["loss"])
        self._save(best)
        self._progress.record(record, best is not None)
        self._sums.pause(self._clock() - paused)

    def _validate(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        """Validate in process 0; return the value of the metric and the record. If that fails, save and raise."""
        try:
            self._measure()
            share, started = self._at.share, self._clock()
            with unsharded_parameters(self._update.module):
                metrics = self._processes.on_main(lambda: check_values(self._scores(share), self.config.metric))
        except Exception:
            if self._saved_step != self._at.step:
                self._save()
            raise
        self._metrics = metrics
        self._time.validation_took(self._clock() - started, share)
        record = metrics if share == 1 else {**metrics, "validated_share": share}
        return metrics[self.config.metric], self._write(kind, record)

    def _measure(self) -> None:
        """Measure once in a run with a budget in minutes what share of the held-out data can be validated."""
        held_out, at = self._validation, self._at
        if not self._time.must_measure(math.inf) or not isinstance(held_out, Validation):
            return
        with unsharded_parameters(self._update.module):
            spent, share = self._processes.on_main(lambda: self._time.measure(self._scores, held_out.size, self._clock))
        self._time.validation_took(spent, share)
        if at.best_value is None and (share := self._time.share()) < at.share:
            at.share = share
            self._progress.line(
                f"validation: on {held_out.count(share):,} of {held_out.size:,}, because all would take more than a "
                "tenth of --minutes; `fastformer evaluate` scores them all"
            )

    def _scores(self, share: float) -> Mapping[str, float | str]:
        """Validate in eval mode without gradients, and restore the random generators."""
        assert self._validation is not None
        self.model.eval()
        with self._update.autocast(), torch.no_grad(), preserved_randomness():
            scores = self._validation(self.model, **({"share": share} if share < 1 else {}))
        self.model.train()
        return scores

    def _save(self, best: float | None = None, interim: bool = False) -> None:
        """Save a checkpoint; best: value of the metric if it is the best; interim: the next one replaces it."""
        self._check_finite(self._at.step)
        started = self._clock()
        if self._log is not None:
            self._at.seconds, self._at.records = self._seconds(), self._log.count
        state = {
            "optimizer_name": self.config.optimizer,
            "schedule_name": self.config.schedule,
            "metric": self.config.metric,
            "scaler": self._update.scaler.state_dict(),
            "schedule": self._schedule.state_dict(),
            "sums": self._sums.state_dict(started),
            "position": asdict(self._at),
            "random": self._processes.gather(random_state()),
            "optimizer": whole_tensors(self._update.optimizer.state_dict()["state"], self._processes),
        }
        self._write_checkpoint(state, best, interim)
        self._saved_step, self._saved_interim = self._at.step, interim
        self._save_at = self._wall_clock() + 60 * self.config.save_minutes
        self._time.save_seconds = self._clock() - started

    def _write_checkpoint(self, state: dict[str, Any] | None, best: float | None, interim: bool = False) -> None:
        """Write the model's weights with a state, or without one as the average."""
        values = self._at.step, whole_weights(self.model, self._processes), state, self._architecture, self._metrics
        self._processes.on_main(lambda: self.checkpoints.save(*values, best, interim))

    def _check_finite(self, step: int) -> None:
        """Raise DivergedError if the loss or the gradient of a step so far was not finite; waits for the device."""
        scale = self._update.loss_scale
        if self._sums.finite() and (scale is None or scale >= _LOWEST_SCALE):
            return
        last = self.checkpoints.last()
        last_good = f"the last good checkpoint is {last}" if last else "no checkpoint was written yet"
        scaled = "" if scale is None else f", loss scale {scale:g}"
        raise DivergedError(
            f"loss or gradient is not finite at step {step} (lr {self._sums.rate:.2e}{scaled}); {last_good}; "
            "try a lower lr, more warmup_steps or a lower clip_norm"
        )

    def _finish(self, reason: str) -> None:
        """Save and validate at the end; the saved state is that before the validation, as a longer run needs it."""
        if self._saved_step != self._at.step or self._saved_interim:
            self._save()
        if self._validation is not None and not self._metrics:
            value, record = self._validate("validation")
            best = self._processes.on_main(lambda: is_better(self.config.metric, value, self.checkpoints.best_value()))
            if best:
                self._processes.on_main(lambda: self.checkpoints.mark_best(self.checkpoints.paths()[-1], value))
            self._progress.record(record, best)
        if self.config.average > 1 and reason != "interrupted":
            self._average()

    def _average(self) -> None:
        """Validate and save the average of the last checkpoints; the model keeps its weights."""
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        metrics, best, record = self._metrics, None, None
        try:
            averaged = average_checkpoints(self.checkpoints.paths()[-self.config.average :])
            put_weights(self.model, averaged, self.checkpoints.folder)
            if self._validation is not None:
                value, record = self._validate("average")
                best = value if is_better(self.config.metric, value, self.checkpoints.best_value()) else None
            self._write_checkpoint(None, best)
        finally:
            put_weights(self.model, weights, self.checkpoints.folder)
            self._metrics = metrics
        self._progress.record(record, best is not None)

    def _write(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Write a record and return it; None in a process that does not write."""
        if self._log is None:
            return None
        at = self._at
        at.seconds = self._seconds()
        record = self._log.write(kind, at.step, epoch=at.shown_epoch, seconds=at.seconds, **values)
        if kind in ("train", "epoch"):  # a validation's record counts once it is saved
            at.records = self._log.count
        return record

    def _report(self) -> None:
        """Write a record every `log_every` steps, and show the progress every few seconds."""
        at = self._at
        if at.step % self.config.log_every == 0:
            self._check_finite(at.step)
            values, scale = self._sums.take(self._clock()), self._update.loss_scale
            record = self._write("train", values if scale is None else {**values, "loss_scale": scale})
        elif self._progress.due():
            record = {"step": at.step, "epoch": at.shown_epoch, **self._sums.values(self._clock())}
        else:
            return
        if record is not None:
            at.seconds = self._seconds()
            spent = at.spent(self.config, self._batches)
            self._progress.step(record, spent, at.seconds * (1 - spent) / spent if spent else math.inf)

    def _seconds(self) -> float:
        return self._clock() - self._start
