"""Learning-rate schedules: functions of the step and of the spent share of the budget.

The budget counts steps, epochs or minutes. A decay over minutes ends at its minimum on slow and fast machines alike,
which a decay over steps cannot; the price is that two runs on different machines see different rates at the same step.

Sources: inverse square root, Vaswani et al. 2017, section 5.3; cosine, Loshchilov & Hutter 2017 (without restarts).
"""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastformer.apps.train.config import TrainConfig

SCHEDULES = ("constant", "inverse_sqrt", "cosine", "linear", "plateau", "divide_on_plateau")


class Schedule:
    """The schedule of a `TrainConfig`, with its state.

    All have a linear rise over `warmup_steps`. plateau multiplies the rate by `plateau_factor` after more than
    `plateau_patience` validations in a row without a lower loss; divide_on_plateau divides it by `plateau_divisor`
    after each validation that is not the best so far.
    """

    def __init__(self, config: "TrainConfig") -> None:
        self.config = config
        self._state: dict[str, Any] = {"decay_start": None, "scale": 1.0, "best_loss": math.inf, "bad": 0}

    def rate(self, step: int, progress: float) -> float:
        """Return the rate of step `step` (the first is 1) when `progress` (0 to 1) of the budget was spent before it.

        Call it in the order of the steps: cosine and linear decay from the progress at which the warmup ended, which
        is not known before the run if the budget is in minutes.
        """
        config, warmup = self.config, max(self.config.warmup_steps, 1)
        lowest = config.min_lr if step >= config.warmup_steps else 0.0
        if config.schedule == "inverse_sqrt":
            return max(config.lr * min(step / warmup, math.sqrt(warmup / step)), lowest)
        rate = config.lr * min(1.0, step / warmup)
        if config.schedule in ("plateau", "divide_on_plateau"):
            return max(rate * float(self._state["scale"]), lowest)
        if config.schedule == "constant" or step < config.warmup_steps:
            return rate
        if self._state["decay_start"] is None:
            self._state["decay_start"] = min(progress, 1.0)
        start = float(self._state["decay_start"])
        decayed = min(max((progress - start) / (1.0 - start), 0.0), 1.0) if start < 1.0 else 1.0
        share = 1.0 - decayed if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * decayed))
        minimum = config.min_lr / config.lr
        return config.lr * (minimum + (1.0 - minimum) * share)

    def observe(self, loss: float) -> None:
        """Record a validation loss; only the plateau schedules use it."""
        config, state = self.config, self._state
        divides = config.schedule == "divide_on_plateau"
        patience, factor = (
            (0, 1 / config.plateau_divisor) if divides else (config.plateau_patience, config.plateau_factor)
        )
        state["bad"] += 1
        if loss < state["best_loss"]:
            state |= {"best_loss": loss, "bad": 0}
        elif state["bad"] > patience:
            state |= {"scale": state["scale"] * factor, "bad": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to give the same rates."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._state = {name: state[name] for name in self._state}
