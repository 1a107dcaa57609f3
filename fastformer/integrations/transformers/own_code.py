"""Whether what runs within a layer of a Hugging Face model is as its libraries wrote it.

Methods are put into instances, into classes and into files, by tools of their own or by the one who trains; such code
may look at several rows, and gets batches. What somebody's function was wrapped in is looked through.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial, partialmethod
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from transformers import activations

# Whose functions treat each token alone, or are such as transformers' files import. Of Python, all but what stands in
# for other functions.
_LIBRARIES = {"torch", "transformers", "fastformer", "accelerate", "deepspeed", "liger_kernel", "safetensors"}
_LIBRARIES |= {"typing_extensions", "numpy", "einops", "kernels", "flash_attn", "flash_attn_interface"}
_LIBRARIES |= sys.stdlib_module_names - {"unittest", "__main__"}
_NAMESPACES = {"aten", "prims", "quantized", "_quantized", "onednn", "mkldnn", "fastformer", "liger_kernel"}
# By which of its attributes something to call holds what it calls: of methods, wrappers, parts of functions, functions
# that became operators or TorchScript.
_HELD = ("__func__", "fget", "__wrapped__", "func", "dispatcher", "_init_fn", "_torchdynamo_inline")
_CALLS = {"__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "forward"}
# No forward calls these, and tools put others in their place: to print modules, or to make them faster.
_NOT_CALLED = frozenset(vars(nn.Module)) - _CALLS | {"reset_parameters", "_compiled_call_impl"}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}  # layers have the interface for it


class _Space:
    """A class or file in which modules find methods and functions, and what was found in it when it was looked at."""

    def __init__(self, names: Mapping[str, Any], is_called: Callable[[str], bool]) -> None:
        self.names, self.is_called = names, is_called
        self.held: tuple[Any, ...] | None = None
        self.known = False

    def is_as_written(self) -> bool:
        """Whether all of it is the libraries'; looked at again where it changed."""
        held = tuple(self.names.values())
        if self.held is None or not _same(self.held, held):
            its = [x for name, x in list(self.names.items()) if self.is_called(name) and _may_be_called(x)]
            self.known, self.held = all(map(is_of_libraries, its)), held
        return self.known


def is_of_libraries(function: Any, within: Collection[nn.Module] | None = None) -> bool:
    """Whether something to call, and all that it holds to call in turn, is of those who treat each token alone.

    Args:
        function: also what a class holds for one, such as a property.
        within: the parts of the layer that has it, which are asked by themselves; it may hold no other module. None for
            classes and files: torch makes one for each parametrised module, which it holds.
    """
    to_do, seen = [function], dict[int, Any]()
    while to_do:
        x = to_do.pop()
        if id(x) in seen or issubclass(type(x), type):
            continue
        seen[id(x)] = x
        if issubclass(type(x), nn.Module) and (x is not function if within is None else x in within):
            continue
        if not _is_of_libraries(x):
            return False
        owner = x.__self__ if type(x) is MethodType else None
        if issubclass(type(owner), type) and not _in_libraries(owner.__module__):  # x is its class method
            return False
        to_do += filter(_may_be_called, (owner, *_held_by(x)))
    return True


def _is_of_libraries(x: Any) -> bool:
    kind = type(x)
    if issubclass(kind, nn.Module):  # such a file may have, and nobody asks it for hooks
        return bool(kind.__module__ == activations.__name__)
    if kind is FunctionType:
        return _in_libraries(x.__globals__.get("__name__"))
    if kind is BuiltinFunctionType:
        return _in_libraries(x.__module__ or kind.__module__)
    if kind in (OpOverload, OpOverloadPacket):
        return str(x).partition(".")[0] in _NAMESPACES
    return _in_libraries(kind.__module__)


def _in_libraries(where: Any) -> bool:
    return str(where).partition(".")[0] in _LIBRARIES


def _held_by(x: Any) -> Iterator[Any]:
    if isinstance(x, partial | partialmethod):
        yield from (x.func, *x.args, *x.keywords.values())
    if issubclass(type(x), nn.Module):
        yield from replaced(x)
    for cell in _get(x, "__closure__") or ():
        try:
            its = cell.cell_contents
        except ValueError:  # nothing yet
            continue
        yield from its if type(its) in (list, tuple) else its.values() if type(its) is dict else (its,)
    for name in _HELD:
        yield _get(x, name)


def _get(x: Any, name: str) -> Any:
    """An attribute, or None where there is none or asking for it fails."""
    try:
        return getattr(x, name, None)
    except Exception:
        return None


def _may_be_called(x: Any) -> bool:
    return callable(x) or hasattr(type(x), "__get__")


def replaced(module: nn.Module) -> list[Any]:
    """What a module itself holds to call, such as methods in the place of those of its class."""
    return [x for name, x in module.__dict__.items() if callable(x) and name not in _NOT_CALLED]


def is_as_written(kinds: Iterable[type]) -> bool:
    """Whether classes of libraries, their bases and the files they are in hold what was written there."""
    return all(space.is_as_written() for space in _spaces(frozenset(kinds)))


@lru_cache(maxsize=1000)  # each parametrised module has a class of its own
def _spaces(kinds: frozenset[type]) -> list[_Space]:
    """The classes and files that instances of some classes find their methods and functions in, each once."""
    found = {F.__name__: _file(F.__name__)}
    for kind in kinds:
        for cls in kind.__mro__:
            where = cls.__module__
            if not _in_libraries(where) or cls is object:
                continue
            found[cls] = _class(cls)  # type: ignore[index]
            if where.startswith("transformers.") and where in sys.modules:
                found[where] = _file(where)
    return list(found.values())


@lru_cache(maxsize=5000)
def _class(cls: type) -> _Space:
    return _Space(vars(cls), lambda name: name not in _NOT_CALLED)


@lru_cache(maxsize=5000)
def _file(name: str) -> _Space:
    return _Space(vars(sys.modules[name]), _is_called_in_layers)


def _is_called_in_layers(name: str) -> bool:
    """Of a name in a file; Dynamo puts its own there, with two underscores, which only compiled code calls."""
    of_losses = name.endswith("_loss") or "cross_entropy" in name
    return not (name.startswith("__") or of_losses or name in _ATTENTION)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tuples hold the same objects; what is identical is not compared."""
    try:
        return one == other
    except Exception:  # of tensors, say
        return False
