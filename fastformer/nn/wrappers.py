"""Calls through wrappers of a layer or of its attention: adapters, activation checkpoints, sharded parameters.

A wrapper does something around the call of a module: it merges an adapter into the weights, drops activations, gathers
parameters. Packed runs and cached steps are no call of `forward`, so they go in as an argument of one: the `forward`
of fastformer's layers and attention runs a `DeferredCall`, and wrappers pass on arguments that they do not know.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastformer.nn.hooks import HOOKS

_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
# Classes that call what they wrap with what they are given, by the attribute that holds it.
_WRAPPERS = {
    f"{_CHECKPOINT}.CheckpointWrapper": "_checkpoint_wrapped_module",
    f"{_CHECKPOINT}.OffloadWrapper": "_checkpoint_wrapped_module",
    "peft.tuners.lora.layer.MultiheadAttention": "base_layer",
}
_NO_WRAPPERS = ("fastformer.", "torch.nn.")


class DeferredCall:
    """What a wrapped module runs in place of its own `forward`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run


def call_inside(module: Any, run: Callable[..., Tensor], *inputs: Any) -> Any:
    """Return `run(wrapped module, *inputs)`, computed within the call of the wrapper.

    Args:
        module: a wrapper, or a module with sharded parameters.
        run: takes the wrapped module and the inputs.
        inputs: of a layer all in front of its masks, of an attention the query alone.
    """
    return module(*inputs, DeferredCall(run), None)


def wrapper_chain(module: Any) -> list[Any]:
    """Return a module and what it wraps, the wrapped module last."""
    chain = [module]
    while not type(chain[-1]).__module__.startswith(_NO_WRAPPERS) and (wrapped := _wrapped(chain[-1])) is not None:
        chain.append(wrapped)
    return chain


def unwrap(module: Any) -> Any:
    """Return the module inside known wrappers; the module itself if there is none."""
    return module if type(module).__module__.startswith(_NO_WRAPPERS) else wrapper_chain(module)[-1]


def _wrapped(module: Any) -> Any:
    """Return the module inside a known wrapper, or None.

    Reentrant checkpoints give no gradient to tensors that are no arguments: they are no known wrappers, nor are
    checkpoint functions other than torch's.
    """
    kind = type(module)
    if _has_sharded_class(module):  # fully_shard makes a class of FSDPModule and the module's class
        kind = kind.__bases__[-1]
    name = _WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
    if name is None:
        return None
    function = getattr(module, "checkpoint_fn", None)
    if function is not None:
        torchs = isinstance(function, partial) and function.func is checkpoint
        if not torchs or function.keywords.get("use_reentrant") is not False:
            return None
    return getattr(module, name)


def is_sharded(module: nn.Module) -> bool:
    """Return whether fully_shard has sharded a module's parameters, and the module has no other hooks."""
    if not _has_sharded_class(module):
        return False
    hooks = [hook for name in HOOKS for hook in module.__dict__[name].values()]
    return all(type(getattr(hook, "__self__", None)).__name__ == "FSDPState" for hook in hooks)


def is_gathered(module: nn.Module) -> bool:
    """Return whether a sharded module has all of its parameters, as after `unshard`."""
    return not any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def _has_sharded_class(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
