"""Validation of a model on held-out data, and the time that a budget in minutes leaves for it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastformer.apps.train.config import TrainConfig

RESERVED_FIELDS = ("kind", "step", "epoch", "seconds")  # fields of every record beside its values
_SMALLEST_TRIAL = 8  # examples; one alone takes as long as several if each token is decoded in a step
_VALIDATION = 0.1  # largest part of the budget that one validation may take
_TRIAL = 0.01  # part of the budget that a trial validation takes
_MEASURE_BY = 0.5  # part of the budget after which the cost of a validation is measured if none was due before
_RECENT = 0.2  # weight of the last step in the mean duration of a step


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


def to_perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token, of 700 at most: beyond that, a float overflows."""
    return math.exp(min(loss, 700.0))


def check_values(scores: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return a validation's values as floats and texts, with "perplexity" computed from "loss" if it is absent.

    Raises ValueError if `metric` is not among the values, or a value is named as a field of every record.
    """
    values: dict[str, Any] = {name: value if isinstance(value, str) else float(value) for name, value in scores.items()}
    for name in values:
        if not isinstance(name, str) or name in RESERVED_FIELDS:
            raise ValueError(
                f"validate must name its values by texts, none of them {', '.join(RESERVED_FIELDS)}: {name!r}"
            )
    if "loss" in values:
        values.setdefault("perplexity", to_perplexity(values["loss"]))
    if not isinstance(values.get(metric), float):
        raise ValueError(
            f"metric={metric!r} is not among the validation's values: {', '.join(values)}; what was trained is saved"
        )
    return values


class TimeBudget:
    """The measured costs of steps, saves and validations, in seconds of the clock that the budget counts.

    A run with a budget in minutes ends early enough to save and to validate once more. The cost of a validation is
    stored in steps, so that it follows the speed of the machine: another process on the same cores slows both alike.
    """

    def __init__(self, config: TrainConfig, validates: bool) -> None:
        self._limit = math.inf if config.minutes is None else 60 * config.minutes
        self._at_end = 2 if config.average > 1 else 1  # saves and validations; the average needs one more of each
        self._steps, self._step, self.save_seconds = 0, 0.0, 0.0
        self._validation = None if validates and config.minutes else 0.0  # of all held-out data, in steps

    def step_took(self, seconds: float) -> None:
        """Record the duration of a step. The first one, which may compile and allocate, counts until the second."""
        self._steps += 1
        self._step = seconds if self._steps <= 2 else self._step + _RECENT * (seconds - self._step)

    def validation_took(self, seconds: float, share: float) -> None:
        """Record the duration of a validation, or a trial, on a share of the held-out data, if a step was measured."""
        if self._steps:
            self._validation = seconds / share / max(self._step, 1e-9)

    def must_measure(self, seconds: float) -> bool:
        """Return whether to measure the cost of a validation now, `seconds` after the start of the run."""
        return self._validation is None and self._steps > 0 and seconds >= _MEASURE_BY * self._limit

    def measure(self, score: Callable[[float], object], size: int, clock: Callable[[], float]) -> tuple[float, float]:
        """Score more and more of `size` examples until that takes a hundredth of the budget.

        score: validates on a share of the examples. Returns the seconds and the share of the last trial.
        """
        limit, count = _TRIAL * self._limit, min(_SMALLEST_TRIAL, size)
        while True:
            begun = clock()
            score(count / size)
            spent = clock() - begun
            if spent >= limit or count == size:
                return spent, count / size
            count = min(4 * count if spent < limit / 4 else 2 * count, size)

    def share(self) -> float:
        """Return the largest share of the held-out data that is validated within a tenth of the budget."""
        return min(1.0, _VALIDATION * self._limit / max((self._validation or 0.0) * self._step, 1e-9))

    def reserve(self, share: float, before: float) -> float:
        """Return the seconds that the next step and the end of the run take; `before` without a measured validation."""
        if self._limit == math.inf or self._validation is None:
            return before
        return self._step + self._at_end * (self.save_seconds + share * self._validation * self._step)
