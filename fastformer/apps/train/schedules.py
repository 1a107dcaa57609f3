"""Learning-rate schedules: plain functions of the step and of the progress, and the small state that two of them need.

Every function gives a factor of the peak learning rate. `progress` is the part of the budget that is spent, whatever
the budget counts: steps, epochs or minutes. A decay over minutes ends at its minimum on slow and fast machines alike,
which a decay over steps cannot; the price is that two runs on different machines see different rates at the same step.

Sources: inverse square root, Vaswani et al. 2017, section 5.3; cosine, Loshchilov & Hutter 2017 (without restarts).
"""

import math
from dataclasses import dataclass
from typing import Any

from fastformer.settings import check_value

SCHEDULES = ("constant", "inverse_sqrt", "cosine", "linear", "plateau", "divide_on_plateau")


def warmup(step: int, warmup_steps: int) -> float:
    """Linear rise from 1 / warmup_steps at step 1 to 1 at step warmup_steps, and 1 from there on."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


def inverse_sqrt(step: int, warmup_steps: int) -> float:
    """Linear warmup, then sqrt(warmup_steps / step): 1 at step warmup_steps (at step 1 without warmup)."""
    peak = max(warmup_steps, 1)
    return min(step / peak, math.sqrt(peak / step))


def noam_peak(d_model: int, warmup_steps: int) -> float:
    """The peak rate that makes `inverse_sqrt` the paper's d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)."""
    return 1.0 / math.sqrt(d_model * max(warmup_steps, 1))


def linear(progress: float, floor: float = 0.0) -> float:
    """Straight line from 1 at progress 0 to `floor` at progress 1."""
    return floor + (1.0 - floor) * (1.0 - min(max(progress, 0.0), 1.0))


def cosine(progress: float, floor: float = 0.0) -> float:
    """Half a cosine from 1 at progress 0 to `floor` at progress 1."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


@dataclass
class Schedule:
    """One schedule with its settings and its state.

    name: one of `SCHEDULES`. lr, min_lr: peak and lowest rate. warmup_steps: length of the linear rise, for all.
    plateau multiplies the rate by `plateau_factor` after more than `plateau_patience` validations in a row without a
    lower loss; divide_on_plateau divides it by `plateau_divisor` after each validation that is not the best so far.
    """

    name: str
    lr: float
    warmup_steps: int = 0
    min_lr: float = 0.0
    plateau_factor: float = 0.5
    plateau_patience: int = 2
    plateau_divisor: float = 4.0

    def __post_init__(self) -> None:
        check_value("name", self.name, str, choices=SCHEDULES)
        self._decay_start: float | None = None
        self._scale = 1.0
        self._best_loss = math.inf
        self._bad = 0

    def rate(self, step: int, progress: float) -> float:
        """The rate of step `step` (the first is 1) when `progress` (0 to 1) of the budget was spent before it.

        The decays of cosine and linear begin where the warmup ended, which only the run itself knows when the budget
        is counted in minutes: ask in the order of the steps.
        """
        if self.name == "inverse_sqrt":
            return max(self.lr * inverse_sqrt(step, self.warmup_steps), self._floor(step))
        rate = self.lr * warmup(step, self.warmup_steps)
        if self.name in ("plateau", "divide_on_plateau"):
            return max(rate * self._scale, self._floor(step))
        if self.name == "constant" or step < self.warmup_steps:
            return rate
        if self._decay_start is None:
            self._decay_start = min(progress, 1.0)
        rest = 1.0 - self._decay_start
        decayed = (progress - self._decay_start) / rest if rest > 0.0 else 1.0
        decay = linear if self.name == "linear" else cosine
        return self.lr * decay(decayed, self.min_lr / self.lr)

    def _floor(self, step: int) -> float:
        return self.min_lr if step >= self.warmup_steps else 0.0

    def observe(self, loss: float) -> None:
        """Tell the schedule a validation loss; only the plateau schedules act on it."""
        if loss < self._best_loss:
            self._best_loss, self._bad = loss, 0
        elif self.name == "divide_on_plateau":
            self._scale /= self.plateau_divisor
        else:
            self._bad += 1
            if self._bad > self.plateau_patience and self.name == "plateau":
                self._scale, self._bad = self._scale * self.plateau_factor, 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to give the same rates."""
        return {
            "decay_start": self._decay_start,
            "scale": self._scale,
            "best_loss": self._best_loss,
            "bad": self._bad,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._decay_start = state["decay_start"]
        self._scale, self._best_loss, self._bad = state["scale"], state["best_loss"], state["bad"]
