"""What the checks of the ops share: each names the argument, what it was and what is allowed, before anything runs."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def check_probability(name: str, p: float) -> None:
    """Raise unless 0 <= p <= 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def readable(x: Tensor) -> bool:
    """Whether a tensor has values to look at, where that waits for no device."""
    known = x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()
    return known and not isinstance(x, FakeTensor) and not stands_for_many(x)


def stands_for_many(x: Tensor) -> bool:
    """Whether x is one of many to vmap, be it inside other transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def transformed() -> bool:
    """Whether torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
