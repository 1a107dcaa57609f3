"""Compare two models of equal parameters: output and gradients without dropout, then a training step or inference."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.race import Contender, Race, flat_gradients


def padding_of(lengths: Tensor, device: torch.device) -> Tensor:
    """Return bool `[B, L]`, True at padding."""
    return (torch.arange(int(lengths.max())) >= lengths[:, None]).to(device)


def decoder_masks(target: Tensor, source_padding: Tensor | None, target_padding: Tensor | None) -> dict[str, Any]:
    """Return the masks of a decoder of torch.nn for a target `[B, T, D]`, True = ignore; None: nothing is padding."""
    return {
        "tgt_mask": torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1),
        "tgt_is_causal": True,
        "tgt_key_padding_mask": target_padding,
        "memory_key_padding_mask": source_padding,
    }


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
    """Compare fastformer's model, the first of `models` by their names, with a competitor's.

    `forward` returns a model's output, which is compared at `real` positions (bool); `parameters` are those whose
    gradients are compared. A case that trains times forward and backward with dropout, from random gradients of real
    positions, else forward alone. With `per_token`, speeds are real positions a second.
    """
    infer = torch.no_grad()(forward)
    model, other = models.values()
    output = infer(model.eval())
    direction = torch.randn_like(output) * real.view(*real.shape, *[1] * (output.dim() - real.dim())) / real.sum()

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        forward(model).backward(direction)  # type: ignore[no-untyped-call]

    with race.competitor():
        race.gate("output", output[real], infer(other.eval())[real], tolerance)
    if trains:
        step(model)
        with race.competitor():
            step(other)
            gradients = [flat_gradients(parameters(each)) for each in (model, other)]
            race.gate("gradients", gradients[0], gradients[1], gradient_tolerance)
    run, tokens = step if trains else infer, int(real.sum()) if per_token else 1
    sides = []
    for name, net in models.items():
        pass_of_step = partial(forward, net) if trains else None
        sides.append(Contender(name, partial(run, net.train(trains)), tokens, pass_of_step, net.parameters()))
    race(case, *sides, **fields)
