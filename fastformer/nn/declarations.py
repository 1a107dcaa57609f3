"""`token_wise`: declare that a part treats each token alone, so that a stack may hand it packed tokens."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import nn

from fastformer.nn.inspection import TOKEN_WISE

T = TypeVar("T", bound=Callable[..., Any])


def token_wise(part: T) -> T:
    """Declare that a class of modules, or a function, treats each token alone; usable as a decorator. Returns it.

    Stacks with such parts then run without padding and decode with a cache: a part gets `[T, D]` in place of
    `[B, L, D]`. A linear layer with an adapter is token-wise, a convolution over positions is not. Nothing checks it.

    Args:
        part: a subclass of nn.Module, itself and not its subclasses; or an activation function, hashable.

    Raises:
        TypeError: it is neither.
    """
    of_modules = isinstance(part, type) and issubclass(part, nn.Module)
    if not (of_modules or (callable(part) and not isinstance(part, type | nn.Module))):
        name = part.__name__ if isinstance(part, type) else type(part).__name__
        raise TypeError(f"token_wise takes a class of modules or a function, not {name}")
    if not isinstance(part, Hashable):
        raise TypeError(f"token_wise takes functions that are hashable, not a {type(part).__name__}")
    TOKEN_WISE.add(part)
    return part
