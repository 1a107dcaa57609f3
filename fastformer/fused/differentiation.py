"""What the autograd Functions of this folder share: autocast before them, and the second derivative.

Kernels have a first derivative only. Where a gradient is itself to be differentiated (`create_graph=True`,
`torch.func`), backward differentiates the plain formula of the op instead, which the caller hands over: nothing in this
folder imports the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., Tensor | tuple[Tensor, ...]]


def to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors to the autocast dtype where autocast is on; custom ops do not see autocast."""
    device = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors)


def distinct(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a view of what is there before: torch.compile (2.13) takes no Function that is given one tensor twice."""
    if not torch.compiler.is_compiling():
        return tensors
    found: list[Tensor | None] = []
    for x in tensors:
        found.append(x.view_as(x) if x is not None and any(x is y for y in found) else x)
    return tuple(found)


def twice(formula: Formula | None) -> bool:
    """Whether a backward pass must be differentiable itself, and thus go through `formula`."""
    return formula is not None and torch.is_grad_enabled()


def plain_gradients(
    formula: Formula,
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Differentiate `formula(*inputs)` in a differentiable way.

    Args:
        formula: the op in plain PyTorch, a function of the op's differentiable inputs.
        inputs: those, in order; None where not given.
        wanted: for each, whether its gradient is wanted.
        grads: of the formula's outputs; None where an output plays no part.

    Returns:
        A gradient, or None, for each input.
    """
    # Each gradient is that of one place: not of the other places where the same tensor is given, nor of what another
    # input was made of it (weights tied to an embedding, the residual that a sublayer started from).
    inputs = [x if x is None else x.view_as(x) for x in inputs]
    outputs = formula(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    used = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    sources: list[Any] = [x for x, needed in zip(inputs, wanted, strict=True) if needed]
    roots, directions = [out for out, _ in used], [grad for _, grad in used]
    found = iter(torch.autograd.grad(roots, sources, directions, create_graph=True, allow_unused=True))
    return tuple(next(found) if needed else None for needed in wanted)
