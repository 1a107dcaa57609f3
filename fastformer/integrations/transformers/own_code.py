"""Whether what runs within a layer of a Hugging Face model is as its libraries wrote it.

Methods are put into instances, into classes and into files, by tools of their own or by the one who trains; such code
may look at several rows, and gets batches. What somebody's function was wrapped in is looked through.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch.nn.functional as F
from torch import nn

# Whose functions treat each token alone, or are such as transformers' files import. Of Python, all but what stands in
# for other functions.
_LIBRARIES = {"torch", "transformers", "fastformer", "accelerate", "deepspeed", "liger_kernel", "safetensors"}
_LIBRARIES |= {"typing_extensions", "numpy", "einops", "kernels", "flash_attn", "flash_attn_interface"}
_LIBRARIES |= sys.stdlib_module_names - {"unittest", "__main__"}
_BASES = {nn.Module: ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")}
# Of each class or file that was looked at: what it held, and whether all of that was the libraries'.
_looked_at: dict[object, tuple[tuple[Any, ...], bool]] = {}


def is_of_libraries(function: Any) -> bool:
    """Whether something to call, and all that it holds to call in turn, is of those who treat each token alone."""
    to_do, seen = [function], set()
    while to_do:
        x = to_do.pop()
        if id(x) in seen or isinstance(x, type):
            continue
        seen.add(id(x))
        if not _is_of_libraries(x):
            return False
        owner = getattr(x, "__self__", None)
        if isinstance(owner, nn.Sequential):  # whose forward is that of its parts
            to_do += owner
        if isinstance(x, partial):
            to_do += [x.func, *filter(_calls, (*x.args, *x.keywords.values()))]
        to_do += [cell.cell_contents for cell in getattr(x, "__closure__", None) or () if _holds_calls(cell)]
        to_do += [its for its in (getattr(x, name, None) for name in ("__func__", "fget", "__wrapped__")) if its]
    return True


def _is_of_libraries(x: Any) -> bool:
    x = getattr(x, "__func__", x)
    names = getattr(x, "__globals__", None)
    where = type(x).__module__ if names is None else str(names.get("__name__", ""))
    return where.partition(".")[0] in _LIBRARIES


def _calls(x: Any) -> bool:
    """Whether x is something to call that is no part of a model, of which layers are asked by themselves."""
    return callable(x) and not isinstance(x, type | nn.Module)


def _holds_calls(cell: Any) -> bool:
    try:
        return _calls(cell.cell_contents)
    except ValueError:  # nothing yet
        return False


def replaced(module: nn.Module) -> list[Any]:
    """What stands in a module itself in the place of methods of its class."""
    state, kind = module.__dict__, type(module)
    methods: frozenset[str] = _methods(kind)  # type: ignore[arg-type]
    return [] if methods.isdisjoint(state) else [state[name] for name in methods & state.keys()]


@cache
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for cls in kind.__mro__ for name, x in vars(cls).items() if _may_be_called(x))


def is_as_written(kinds: Iterable[type]) -> bool:
    """Whether classes of libraries, their bases and the files they are in hold what was written there."""
    return all(_holds_its_own(key, space) for key, space in _spaces(frozenset(kinds)))


@cache
def _spaces(kinds: frozenset[type]) -> list[tuple[object, Mapping[str, Any]]]:
    """The classes and files that instances of some classes find their methods and functions in, each once."""
    found: dict[object, Mapping[str, Any]] = {F.__name__: vars(F)}
    for kind in kinds:
        for cls in kind.__mro__:
            where = cls.__module__
            if where.partition(".")[0] not in _LIBRARIES or cls is object:
                continue
            found[cls] = vars(cls)
            if where.startswith("transformers.") and where in sys.modules:
                found[where] = vars(sys.modules[where])
    return list(found.items())


def _holds_its_own(key: object, space: Mapping[str, Any]) -> bool:
    names = _BASES.get(key)  # type: ignore[call-overload]
    held = tuple(space.values()) if names is None else tuple([space[name] for name in names])
    known = _looked_at.get(key)
    if known is None or not _same(known[0], held):
        known = _looked_at[key] = held, all(is_of_libraries(x) for x in held if _may_be_called(x))
    return known[1]


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tuples hold the same objects; what is identical is not compared."""
    try:
        return one == other
    except Exception:  # of tensors, say
        return False


def _may_be_called(x: Any) -> bool:
    return _calls(x) or isinstance(x, property | staticmethod | classmethod)
