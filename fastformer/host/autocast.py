"""Parameters that are cast together for autocast, and their gradients.

torch casts a parameter at its first matrix product, and its gradient in backward: a kernel each, 266 in a
step of 6+6 layers. Within `cast_together` one op casts all parameters, and one all their gradients: some 8 launches.
Numbers are equal to torch's: gradients of a parameter that is used twice are added in 16 bits, as with torch's cached
casts. Only callers of `devices.in_autocast` get such a copy; the parameters of modules do not change.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastformer.host.devices import copies


@contextmanager
def cast_together(parameters: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Cast fp32 parameters once for a forward pass in this thread, whose backward casts their gradients once.

    Autocast itself casts those without `requires_grad`. dtype: autocast's; None: nothing is cast.
    """
    trainable = [p for p in parameters if p.requires_grad] if dtype is not None and torch.is_grad_enabled() else []
    if not trainable:
        yield
        return
    cast = _CastTogether.apply(dtype, *trainable)  # type: ignore[no-untyped-call]
    before = copies.of
    copies.of = {id(p): (p, p._version, copy) for p, copy in zip(trainable, cast, strict=True)}
    try:
        yield
    finally:
        copies.of = before


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
