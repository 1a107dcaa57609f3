"""A call of an autograd Function that costs the host no more than it must.

`Function.apply` of a Function with `setup_context`, which functorch asks for, binds its arguments by name at every call
(`inspect.signature`): a third of the host time of a fused layer norm. Small batches on a GPU wait for the host. From
torch 2.15 on it is the C++ behind both that binds, so that only calls without a gradient are spared it.
"""

from typing import Any

import torch
from torch import Tensor


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Do what `function.apply(*args)` does; every parameter of `forward` must be given, in order.

    Where nothing is to be differentiated, `forward` runs by itself.
    """
    if torch.compiler.is_compiling() or _transformed():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return function.forward(*args)


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on, even without `requires_grad`."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0
