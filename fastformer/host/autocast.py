"""Casts of all parameters for autocast in one op, and of all their gradients in another.

torch's autocast casts each parameter at its first matrix product, and its gradient in backward: 266 kernels in a step
of 6+6 layers. Within `cast_parameters_together` they are about 8. As with torch's cached casts, gradients of a
parameter that is used twice are added in 16 bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def cast_parameters_together(modules: Sequence[nn.Module], dtype: torch.dtype | None) -> Iterator[None]:
    """Let modules hold copies of their weights and biases in autocast's dtype during a forward pass.

    The modules must use them in matrix products only. Copies fp32 parameters that require a gradient; backward casts
    all gradients at once. dtype: that of autocast; None: nothing is cast.
    """
    trains = dtype is not None and torch.is_grad_enabled()
    places = [
        (module._parameters, name, p)
        for module in (modules if trains else ())
        for name, p in module._parameters.items()
        if name.endswith(("weight", "bias")) and p is not None and p.requires_grad and p.dtype == torch.float32
    ]
    if not places:
        yield
        return
    unique = {id(p): p for _, _, p in places}
    copies = dict(zip(unique, _CastTogether.apply(dtype, *unique.values()), strict=True))  # type: ignore[no-untyped-call]
    try:
        for parameters, name, p in places:
            parameters[name] = copies[id(p)]
        yield
    finally:
        for parameters, name, p in places:
            parameters[name] = p


class _CastTogether(torch.autograd.Function):
    """dtype, parameters -> copies of the parameters."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters  # for their layout; their values may change
        cast = tuple([torch.empty_like(p, dtype=dtype) for p in parameters])
        torch._foreach_copy_(cast, parameters)
        return cast

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [(grad, p) for grad, p in zip(grads, ctx.parameters, strict=True) if grad is not None]
        cast = [torch.empty_like(p) for _, p in used]
        torch._foreach_copy_(cast, [grad for grad, _ in used])
        gradients = iter(cast)
        return None, *(None if grad is None else next(gradients) for grad in grads)
