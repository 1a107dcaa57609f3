"""Validation: named values of a model on held-out data, one of which decides if a checkpoint is the best so far."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastformer.apps.train.metrics import OF_RECORD
from fastformer.apps.train.parallel import gathered
from fastformer.apps.train.processes import Processes
from fastformer.apps.train.randomness import preserved_randomness
from fastformer.apps.train.records import Records
from fastformer.apps.train.run_state import RunState
from fastformer.apps.train.time_budget import TimeBudget
from fastformer.apps.train.update import Update

_SMALLEST_TRIAL = 8  # examples; one alone takes as long as several if each token is decoded in a step


@dataclass(frozen=True)
class Validation:
    """Scores a model on `size` held-out examples, or on a share of them if there is no time for all.

    score(model, indices): the values on the examples at `indices`, int64 `[n]`, in ascending order.
    """

    size: int
    score: Callable[[Any, NDArray[np.int64]], Mapping[str, float | str]]

    def __call__(self, model: Any, share: float = 1.0) -> Mapping[str, float | str]:
        """Score a model on evenly spaced examples, at least one."""
        count = self.count(share)
        return self.score(model, np.arange(count) * self.size // count)

    def count(self, share: float) -> int:
        """Return how many examples a share of them has."""
        return min(max(int(share * self.size), 1), self.size)


class Evaluation:
    """Validates `model` in process 0, while the other processes wait, and records the values.

    With a budget in minutes, a `Validation` scores the share of the data that there is time for; any other `validate`
    (see `Trainer`) is called as it is. All processes call the same methods. clock: returns the seconds of the budget.
    """

    def __init__(
        self,
        validate: Callable[[Any], Mapping[str, float | str]],
        model: nn.Module,
        update: Update,
        processes: Processes,
        state: RunState,
        records: Records,
        budget: TimeBudget,
        metric: str,
        clock: Callable[[], float],
    ) -> None:
        self._validate, self._model, self._metric, self._clock = validate, model, metric, clock
        self._update, self._processes = update, processes
        self._state, self._records, self._budget = state, records, budget

    def run(self, kind: str) -> tuple[float, dict[str, Any] | None]:
        """Validate, write a record of this kind, and return the value of the metric and the record to show."""
        self.measure()
        share, started = self._state.at.share, self._clock()
        with gathered(self._update.module, self._processes):
            metrics = self._processes.on_main(lambda: check_values(self._values(share), self._metric))
        self._state.metrics = metrics
        self._budget.validation_took(self._clock() - started, share)
        shared = {} if share == 1 else {"validated_share": share}
        return metrics[self._metric], self._records.write(kind, {**metrics, **shared})

    def measure(self) -> None:
        """Measure once in a run with a budget in minutes what share of the held-out data can be validated."""
        seconds, held_out, at = self._budget.trial_seconds, self._validate, self._state.at
        if self._budget.knows_validation or seconds is None or not isinstance(held_out, Validation):
            return
        with gathered(self._update.module, self._processes):
            spent, share = self._processes.on_main(lambda: self._trial(seconds, held_out.size))
        self._budget.validation_took(spent, share)
        if at.best_value is None and (share := self._budget.share()) < at.share:
            at.share = share
            self._records.progress.line(
                f"validation: on {held_out.count(share):,} of {held_out.size:,}, because all would take more than a "
                "tenth of --minutes; `fastformer evaluate` scores them all"
            )

    def _trial(self, seconds: float, size: int) -> tuple[float, float]:
        """Validate on more and more examples until that takes `seconds`; return its duration and its share of them."""
        count = min(_SMALLEST_TRIAL, size)
        while True:
            begun = self._clock()
            self._values(count / size)
            spent = self._clock() - begun
            if spent >= seconds or count == size:
                return spent, count / size
            count = min(4 * count if spent < seconds / 4 else 2 * count, size)

    def _values(self, share: float) -> dict[str, Any]:
        """Validate in eval mode without gradients, and restore the random generators."""
        self._model.eval()
        with self._update.autocast(), torch.no_grad(), preserved_randomness():
            scores = self._validate(self._model, share) if share < 1 else self._validate(self._model)  # type: ignore[call-arg]
            values = {name: value if isinstance(value, str) else float(value) for name, value in scores.items()}
        self._model.train()
        return values


def check_values(values: dict[str, Any], metric: str) -> dict[str, Any]:
    """Return the values, with "perplexity" computed from "loss" if it is absent.

    Raises ValueError if `metric` is not among the values, or a value is named as a field of every record.
    """
    for name in values:
        if not isinstance(name, str) or name in OF_RECORD:
            raise ValueError(f"validate must name its values by texts, none of them {', '.join(OF_RECORD)}: {name!r}")
    if "loss" in values:
        values.setdefault("perplexity", math.exp(min(values["loss"], 700.0)))
    if not isinstance(values.get(metric), float):
        raise ValueError(
            f"metric={metric!r} is not among the validation's values: {', '.join(values)}; what was trained is saved"
        )
    return values
