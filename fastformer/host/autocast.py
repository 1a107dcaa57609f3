"""Autocast where torch's own does not reach: the tensors of our ops, and parameters, which are cast together.

torch casts a parameter where a matrix product first meets it, and its gradient on the way back: a kernel each, 266 in a
step of 6+6 layers. Within `cast_together` one op casts all parameters, and one all their gradients: some 8 launches.
The numbers are those of torch: the gradients of what is used twice are added in 16 bits, as those of its cached casts.
Only those who ask here get such a copy; a module's parameters stay what they are for whoever else looks at them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastformer.modes import compiling


class _Thread(threading.local):
    """Of each parameter that was cast together with others: itself, its version then, and its copy."""

    copies: dict[int, tuple[Tensor, int, Tensor]] | None = None


_thread = _Thread()


def in_autocast(parameter: Tensor | None) -> Any:
    """Return the copy of a parameter in the dtype of autocast where it has one, else itself, which torch then casts."""
    if compiling() or _thread.copies is None or parameter is None:
        return parameter
    found = _thread.copies.get(id(parameter))
    if found is None or found[1] != parameter._version:
        return parameter
    device, copy = parameter.device.type, found[2]
    on = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == copy.dtype
    return copy if on else parameter


def to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast floating-point tensors to the autocast dtype where autocast is on; custom ops do not see autocast."""
    device = next(x for x in tensors if x is not None).device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    found = [in_autocast(x) for x in tensors]
    return tuple([x.to(dtype) if x is not None and x.is_floating_point() else x for x in found])


@contextmanager
def cast_together(parameters: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Cast parameters once for a forward pass in this thread, whose backward casts their gradients once.

    Args:
        parameters: fp32, each once; those without `requires_grad` are left to autocast.
        dtype: that autocast is on with; None: nothing is cast.
    """
    given = [p for p in parameters if p.requires_grad] if dtype is not None and torch.is_grad_enabled() else []
    if not given:
        yield
        return
    copies = _CastTogether.apply(dtype, *given)  # type: ignore[no-untyped-call]
    before = _thread.copies
    _thread.copies = {id(p): (p, p._version, copy) for p, copy in zip(given, copies, strict=True)}
    try:
        yield
    finally:
        _thread.copies = before


class _CastTogether(torch.autograd.Function):
    """dtype, parameters -> their copies."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters  # for their layout: what becomes of their values is no matter
        copies = tuple([torch.empty_like(p, dtype=dtype) for p in parameters])
        torch._foreach_copy_(copies, parameters)
        return copies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [(grad, p) for grad, p in zip(grads, ctx.parameters, strict=True) if grad is not None]
        cast = [torch.empty_like(p) for _, p in used]
        torch._foreach_copy_(cast, [grad for grad, _ in used])
        found = iter(cast)
        return None, *(None if grad is None else next(found) for grad in grads)
