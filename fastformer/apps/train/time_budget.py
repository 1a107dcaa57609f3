"""`TimeBudget`: measure steps, saves and validations of a run with a budget in minutes, and reserve time for its end.

Such a run ends early enough to save and to validate once more. The cost of a validation is stored in steps, so that it
follows the speed of the machine: another process on the same cores slows steps and validations down alike.
"""

from fastformer.apps.train.config import TrainConfig

_VALIDATION = 0.1  # largest part of the budget that one validation may take
_TRIAL = 0.01  # part of the budget that a trial validation takes
_MEASURE_BY = 0.5  # part of the budget after which the cost of a validation is measured if none was due before
_RECENT = 0.2  # weight of the last step in the mean duration of a step


class TimeBudget:
    """The costs measured so far, in seconds of the clock that the budget counts.

    Attributes:
        trial_seconds: duration of a trial validation; None without a budget in minutes.
    """

    def __init__(self, config: TrainConfig, validates: bool) -> None:
        self._limit = None if config.minutes is None else 60 * config.minutes
        self._at_end = 2 if config.average > 1 else 1  # saves and validations; the average needs one more of each
        self._steps, self._step, self._save = 0, 0.0, 0.0
        self._validation = None if validates else 0.0  # of all held-out data, in steps
        self.trial_seconds = None if self._limit is None else _TRIAL * self._limit

    def step_took(self, seconds: float) -> None:
        """Record the duration of a step. The first one, which may compile and allocate, counts until the second."""
        self._steps += 1
        self._step = seconds if self._steps <= 2 else self._step + _RECENT * (seconds - self._step)

    def save_took(self, seconds: float) -> None:
        """Record the duration of a save."""
        self._save = seconds

    def validation_took(self, seconds: float, share: float) -> None:
        """Record the duration of a validation on a share of the held-out data."""
        self._validation = seconds / share / max(self._step, 1e-9)

    @property
    def knows_validation(self) -> bool:
        """Whether a validation, or a trial on a share of the data, was measured."""
        return self._validation is not None

    def must_measure(self, seconds: float) -> bool:
        """Return whether to measure the cost of a validation now, `seconds` after the start of the run."""
        return self._limit is not None and not self.knows_validation and seconds >= _MEASURE_BY * self._limit

    def share(self) -> float:
        """Return the largest share of the held-out data that is validated within a tenth of the budget."""
        if self._limit is None or not self._validation:
            return 1.0
        return min(1.0, _VALIDATION * self._limit / max(self._validation * self._step, 1e-9))

    def reserve(self, share: float) -> float | None:
        """Return the seconds that the next step and the end of the run take; None before a validation was measured."""
        if self._limit is None:
            return 0.0
        if self._validation is None:
            return None
        return self._step + self._at_end * (self._save + share * self._validation * self._step)
