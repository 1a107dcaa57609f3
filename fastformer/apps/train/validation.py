"""What a validation gives: named values, one of which says whether a checkpoint is the best so far."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fastformer.apps.train.metrics import LOWER_IS_BETTER, OF_RECORD
from fastformer.apps.train.randomness import preserved_randomness


def validation_values(validate: Callable[[Any], Mapping[str, Any]], model: nn.Module, metric: str) -> dict[str, Any]:
    """What `validate` finds of a model in eval mode, without gradients and without a trace in the generators.

    Its values are numbers, and texts that explain them: `bleu_signature` stands beside `bleu` in the log.

    "perplexity" is added from "loss" where it is absent. Raises ValueError where `metric` is not among the values, or
    one is named like what each record says.
    """
    model.eval()
    with torch.no_grad(), preserved_randomness():
        found = validate(model).items()
        values: dict[str, Any] = {name: value if isinstance(value, str) else float(value) for name, value in found}
    model.train()
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


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Whether a value of a metric is better than the best so far, None for none; NaN never is."""
    if math.isnan(value):
        return False
    return best is None or (value < best if metric in LOWER_IS_BETTER else value > best)
