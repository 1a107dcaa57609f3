"""Learning-rate schedules: functions of the step and of the spent share of the budget.

The budget counts steps, epochs or minutes. A decay over minutes ends at its minimum on slow and fast machines alike,
which a decay over steps cannot; the price is that two runs on different machines see different rates at the same step.

Sources: inverse square root, Vaswani et al. 2017, section 5.3; cosine, Loshchilov & Hutter 2017 (without restarts).
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from fastformer.settings import check_value

SCHEDULES = ("constant", "inverse_sqrt", "cosine", "linear", "plateau", "divide_on_plateau")


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
        self._state: dict[str, Any] = {"decay_start": None, "scale": 1.0, "best_loss": math.inf, "bad": 0}

    @classmethod
    def of(cls, config: Any) -> "Schedule":
        """Return the schedule of a `TrainConfig`."""
        return cls(config.schedule, **{each.name: getattr(config, each.name) for each in fields(cls)[1:]})

    def rate(self, step: int, progress: float) -> float:
        """Return the rate of step `step` (the first is 1) when `progress` (0 to 1) of the budget was spent before it.

        Call it in the order of the steps: cosine and linear decay from the progress at which the warmup ended, which
        is not known before the run if the budget is in minutes.
        """
        lowest = self.min_lr if step >= self.warmup_steps else 0.0
        if self.name == "inverse_sqrt":
            peak = max(self.warmup_steps, 1)
            return max(self.lr * min(step / peak, math.sqrt(peak / step)), lowest)
        rate = self.lr * (min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0)
        if self.name in ("plateau", "divide_on_plateau"):
            return max(rate * float(self._state["scale"]), lowest)
        if self.name == "constant" or step < self.warmup_steps:
            return rate
        if self._state["decay_start"] is None:
            self._state["decay_start"] = min(progress, 1.0)
        start = float(self._state["decay_start"])
        decayed = min(max((progress - start) / (1.0 - start), 0.0), 1.0) if start < 1.0 else 1.0
        share = 1.0 - decayed if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * decayed))
        minimum = self.min_lr / self.lr
        return self.lr * (minimum + (1.0 - minimum) * share)

    def observe(self, loss: float) -> None:
        """Record a validation loss; only the plateau schedules use it."""
        state = self._state
        if loss < state["best_loss"]:
            state |= {"best_loss": loss, "bad": 0}
        elif self.name == "divide_on_plateau":
            state["scale"] /= self.plateau_divisor
        else:
            state["bad"] += 1
            if state["bad"] > self.plateau_patience and self.name == "plateau":
                state |= {"scale": state["scale"] * self.plateau_factor, "bad": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to give the same rates."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._state = {name: state[name] for name in self._state}
