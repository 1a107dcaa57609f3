"""Compare two models of equal parameters: output and gradients without dropout, then a training step or inference."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.race import Contender, Race, flat_gradients


def race_models(
    race: Race,
    case: str,
    models: Mapping[str, nn.Module],
    forward: Callable[[Any], Tensor],
    real: Tensor,
    *,
    trains: bool,
    tolerance: float,
    gradient_tolerance: float,
    per_token: bool = True,
    parameters: Callable[[Any], Iterable[Tensor]] = nn.Module.parameters,
    **fields: Any,
) -> None:
    """Compare fastformer's model with a competitor's.

    Args:
        race: of this case.
        case: its name.
        models: both by their names, fastformer's first.
        forward: returns a model's output.
        real: bool, the positions of the output that are no padding; the others are not compared.
        trains: time forward and backward with dropout, from random gradients of real positions; else forward alone.
        tolerance: of the output.
        gradient_tolerance: of the gradients.
        per_token: speeds are real positions a second.
        parameters: those of a model whose gradients are compared.
        fields: see `Race.__call__`.
    """
    infer = torch.no_grad()(forward)
    ours, theirs = models.values()
    output = infer(ours.eval())
    direction = torch.randn_like(output) * real.view(*real.shape, *[1] * (output.dim() - real.dim())) / real.sum()

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        forward(model).backward(direction)  # type: ignore[no-untyped-call]

    with race.competitor():
        race.gate("output", output[real], infer(theirs.eval())[real], tolerance)
    if trains:
        step(ours)
        with race.competitor():
            step(theirs)
            found, expected = (flat_gradients(parameters(each)) for each in (ours, theirs))
            race.gate("gradients", found, expected, gradient_tolerance)
    race.note(padding_share=1 - float(real.float().mean()))
    run, tokens = step if trains else infer, int(real.sum()) if per_token else 1
    sides = (
        Contender(
            name,
            partial(run, model.train(trains)),
            tokens,
            partial(forward, model) if trains else None,
            model.parameters(),
        )
        for name, model in models.items()
    )
    race(case, *sides, **fields)
