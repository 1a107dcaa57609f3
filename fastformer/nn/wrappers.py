"""Calls through what wraps a layer or its attention: adapters, activation checkpoints, sharded parameters.

A wrapper does something around the call of a module: it merges an adapter into the weights, drops activations, gathers
parameters. Packed sequences and steps with a cache are no call of that module's `forward`; so they go in as an argument
of one. Our `forward`s run an `Inside` that they are given, and wrappers pass on what they do not know.
"""

import sys
from collections.abc import Callable, Iterator
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


class Inside:
    """What a wrapped module is to run in place of its own forward."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run


def unwrap(module: Any) -> Any:
    """Return the module inside of known wrappers; itself where there is none."""
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def levels(module: Any) -> Iterator[Any]:
    """Yield a module, and what it wraps, down to what `unwrap` returns."""
    inner = module
    while inner is not None:
        yield inner
        inner = _inside(inner)


def _inside(module: Any) -> Any:
    """Return what a known wrapper wraps; None of another module.

    Checkpoints that are computed again by a second backward pass (`use_reentrant`) give no gradient to tensors that are
    no arguments, and of a checkpoint function of somebody's own nobody knows: these are no known wrappers.
    """
    # What fully_shard shards becomes a class of both.
    kind = type(module).__bases__[-1] if _is_fsdp(module) else type(module)
    name = _WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
    if name is None:
        return None
    run = getattr(module, "checkpoint_fn", None)
    if run is not None:
        torchs = isinstance(run, partial) and run.func is checkpoint
        if not torchs or run.keywords.get("use_reentrant") is not False:
            return None
    return getattr(module, name)


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard has taken a module's parameters apart, and whether that is all that its hooks do."""
    if not _is_fsdp(module):
        return False
    state: dict[str, Any] = module.__dict__
    hooks = [hook for name in HOOKS for hook in state[name].values()]
    return all(type(getattr(hook, "__self__", None)).__name__ == "FSDPState" for hook in hooks)


def is_gathered(module: nn.Module) -> bool:
    """Whether a sharded module has all of its parameters, as after `unshard`."""
    return not any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def _is_fsdp(module: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def within(module: Any, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return run(module, *inputs), computed within the call of what wraps the module.

    Args:
        module: a wrapper, or what fully_shard has sharded.
        run: takes what is wrapped.
        inputs: of a layer all in front of its masks, of an attention the query alone.
    """
    return module(*inputs, Inside(run), None)  # type: ignore[no-any-return]
