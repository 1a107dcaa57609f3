"""Modules with the kernels inside against torch.nn's own, with the same parameters, by the rule of fused_op.py."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.support.fused_op import Op, assert_as_accurate_as_reference

D, H, FF, B, T, S = 16, 2, 24, 2, 5, 7


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def values(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of which none is zero or one, so that swapped and forgotten ones show."""
    scales = {name: x.shape[-1] ** -0.5 if x.dim() > 1 else 0.4 for name, x in module.named_parameters()}
    return {name: scales[name] * random(*x.shape) for name, x in module.named_parameters()}


def as_op(call: Callable[..., Any], names: list[str], settings: dict[str, Any]) -> Op:
    """Make a function of tensors of a call with keywords; a setting `key="query"` passes the same tensor twice."""

    def op(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        out = call(given | {name: given[x] if x in names else x for name, x in settings.items()})
        return (out,) if isinstance(out, Tensor) else tuple(x for x in out if x is not None)

    return op


def check(
    ours: nn.Module,
    torchs: nn.Module | Callable[..., Tensor],
    dtype: torch.dtype,
    inputs: dict[str, Tensor],
    **settings: Any,
) -> None:
    """Compare outputs and the gradients of all floating-point inputs, masks among them, and of all parameters.

    Args:
        ours: run with the kernels.
        torchs: a module with parameters of the same names, or a function of the parameters and of what ours takes.
        dtype: of inputs and parameters.
        inputs: by the names that forward gives them.
        settings: what else forward takes; the name of an input stands for it.
    """
    parameters = values(ours)

    def run(module: nn.Module | Callable[..., Tensor]) -> Op:
        def call(given: dict[str, Any]) -> Any:
            given = dict(given)
            held = {name: given.pop(f"parameter {name}") for name in parameters}
            if isinstance(module, nn.Module):
                return functional_call(module, held, (), given, strict=True)
            return module(held, **given)

        return as_op(call, [*inputs, *(f"parameter {name}" for name in parameters)], settings)

    tensors = [*inputs.values(), *parameters.values()]
    assert_as_accurate_as_reference(run(ours), tensors, dtype, run(torchs))


def padding(S: int, float_: bool = False) -> Tensor:
    """Padding on the right, on the left and in between; key 1 is real everywhere."""
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, 2:4] = mask[0, 5:] = mask[1, :1] = True
    return torch.where(mask, -math.inf, random(B, S)) if float_ else mask


def right_padding(lengths: list[int], longest: int) -> Tensor:
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


def pairs(*shape: int, float_: bool = False) -> Tensor:
    """A mask of pairs at random; key 1 is open to all, so that no query is left without keys."""
    mask = torch.rand(shape) < 0.4
    mask[..., 1] = False
    return torch.where(mask, -math.inf, random(*shape)) if float_ else mask


def ahead(T: int, float_: bool = False) -> Tensor:
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(mask, -math.inf) if float_ else mask
