"""`Records`: write a run's metrics files and show progress on the terminal, both in process 0 only."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastformer.apps.train.batch_source import BatchSource
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.metrics import MetricsLog
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.progress import Progress, describe
from fastformer.apps.train.run_state import RunState


class Records:
    """Writes and shows the records of a run, and updates time and number of records in its position.

    Args:
        folder, config, state, batches, processes: of the run.
        show: whether to show records on the terminal.
        seconds: returns the seconds since the start of the run, by its clock.
        wall_clock: returns the seconds by which progress is shown.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        state: RunState,
        batches: BatchSource,
        processes: Processes,
        show: bool,
        seconds: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.progress = Progress(show and processes.is_main, clock=wall_clock)
        self._folder, self._config, self._state, self._batches = folder, config, state, batches
        self._writes, self._seconds = processes.is_main, seconds
        self._log: MetricsLog | None = None

    def open(self) -> None:
        """Open the metrics files: keep the records up to the position of the run, and append to them."""
        if self._writes:
            self._log = MetricsLog(self._folder, self._state.at.records, self._config.tensorboard)

    def close(self) -> None:
        """Flush TensorBoard's events."""
        if self._log is not None:
            self._log.close()

    def count(self) -> None:
        """Update time and number of records in the position, before it is saved."""
        if self._log is not None:
            self._state.at.seconds, self._state.at.records = self._seconds(), self._log.count

    def write(self, kind: str, values: Mapping[str, float]) -> dict[str, Any] | None:
        """Write a record and return it; None in a process that does not write."""
        if self._log is None:
            return None
        at = self._state.at
        at.seconds = self._seconds()
        record = self._log.write(kind, at.step, epoch=at.shown_epoch, seconds=at.seconds, **values)
        if kind in ("train", "epoch"):  # a validation's record counts once `count` is called for a save
            at.records = self._log.count
        return record

    def show(self, record: dict[str, Any] | None, best: bool = False) -> None:
        """Show a record; to be called once the results in it are saved."""
        if record is not None:
            kind = "mean of training" if record["kind"] == "epoch" else record["kind"]
            self.progress.line(f"{kind}: {describe(record)}" + ("  best so far, saved" if best else ""))

    def report(self, loss_scale: Callable[[], float | None], clock: Callable[[], float]) -> None:
        """Write a record every `log_every` steps, and show the progress every few seconds."""
        at, sums = self._state.at, self._state.sums
        if at.step % self._config.log_every == 0:
            self._state.check_finite(at.step)
            values, scale = sums.take(clock()), loss_scale()
            record = self.write("train", values if scale is None else {**values, "loss_scale": scale})
        elif self.progress.due():
            record = {"step": at.step, "epoch": at.shown_epoch, **sums.values(clock())}
        else:
            return
        if record is not None:
            spent = at.spent(self._config, self._batches)
            seconds_left = at.seconds * (1 - spent) / spent if spent else math.inf
            self.progress.step(record, spent, seconds_left)
