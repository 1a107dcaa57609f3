"""Modules that call `F.scaled_dot_product_attention`: find them, and make them call `fastformer.sdpa`."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fastformer.functional.sdpa import CallsSdpa
from fastformer.modes import compiling

_NAME = "scaled_dot_product_attention"
_OTHER_PACKAGES = ("torch", "fastformer", "builtins")
_subclasses: dict[type[nn.Module], type[nn.Module]] = {}


def calls_sdpa(cls: type[nn.Module]) -> bool:
    """Return whether a method of the class, or of a base outside of torch and fastformer, names SDPA."""
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in _OTHER_PACKAGES]
    members = [getattr(value, "__func__", value) for base in classes for value in vars(base).values()]
    functions = [value for value in map(inspect.unwrap, members) if isinstance(value, FunctionType)]  # also decorated
    return any(_NAME in names for function in functions for names in _names(function.__code__))


def _names(code: CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def subclass_calling_sdpa(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the same name, whose `forward` calls `fastformer.sdpa` in place of SDPA."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling():
            return cls.forward(self, *args, **kwargs)
        with CallsSdpa():
            return cls.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (cls,), self.__dict__

    if cls not in _subclasses:
        members = {"forward": forward, "__reduce_ex__": reduce, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _subclasses[cls] = type(cls.__name__, (cls,), members)
    return _subclasses[cls]


def _rebuild(cls: type[nn.Module]) -> Any:
    """Return an empty module of the subclass, for pickle and copy, which cannot name that class."""
    return object.__new__(subclass_calling_sdpa(cls))
