"""Predicates about stacks and their modules: hooks, replaced modules, sharded parameters, modules that mix tokens.

A stack is inspected once in each call. It runs packed unless a hook, a replaced `forward`, a subclass, or a module that
is not declared `token_wise` may look at the whole batch.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized

has_global_hooks: Callable[[], bool] = _has_any_global_hook  # whether torch calls hooks for all modules
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TOKEN_WISE: set[Any] = {
    nn.Linear, NonDynamicallyQuantizableLinear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU,
    nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
    F.relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.relu6, F.tanh, F.sigmoid, F.softplus,
    F.hardswish, torch.relu, torch.tanh, torch.sigmoid,
}  # fmt: skip
BLOCKS = "_sa_block", "_mha_block", "_ff_block"  # methods of torch's layers
_ADAPTERS = ("peft.tuners.lora.layer.Linear",)  # token-wise if `base_layer` is
_ATTENTIONS = ("self_attn", "multihead_attn")


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a `forward` in its instance, as set by accelerate."""
    state = module.__dict__
    hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
    return bool(hooks or state.get("_backward_pre_hooks") or "forward" in state)


def runs_composed(layer: nn.Module) -> bool:
    """Return whether `compose` may run in place of a layer's `forward`: nothing overrides that or a block.

    Users replace blocks in the instance, too, to get at attention weights.
    """
    state = layer.__dict__
    replaced = "_sa_block" in state or "_mha_block" in state or "_ff_block" in state
    return getattr(type(layer), "runs_packed", False) and not replaced


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether torch calls hooks for one of the modules, or for all modules; see `has_own_hooks`."""
    return has_global_hooks() or any(map(has_own_hooks, modules))


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has sharded a module's parameters, and the module has no other hooks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    hooks = [hook for name in HOOKS for hook in module.__dict__[name].values()]
    return all(type(getattr(hook, "__self__", None)).__name__ == "FSDPState" for hook in hooks)


def is_unmodified(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Return whether a module is of one of the types, not of a subclass, and has no hooks: an op may replace it."""
    return type(module) in types and not (has_own_hooks(module) or has_global_hooks())


def unmodified_children(module: nn.Module, types: Mapping[str, tuple[type[nn.Module], ...]]) -> set[str]:
    """Return the names of children without hooks, of the types listed for their name; norms of one dimension only."""
    if has_global_hooks():
        return set()
    names: set[str] = set()
    for name, child in module._modules.items():
        if child is not None and type(child) in types.get(name, ()) and not has_own_hooks(child):
            if len(child.__dict__.get("normalized_shape", ())) < 2:
                names.add(name)
    return names


def mixing_reason(module: Any, known: Collection[Any] = ()) -> str | None:
    """Return why a module may look at several tokens; None if its class is in TOKEN_WISE or `known`."""
    kind = type(module)
    if kind not in TOKEN_WISE and kind not in known and is_parametrized(module):  # a generated subclass
        kind = kind.__bases__[0]
    if kind not in TOKEN_WISE and kind not in known:
        if f"{kind.__module__}.{kind.__qualname__}" not in _ADAPTERS:
            return f" is a {type(module).__name__}"
        return (reason := mixing_reason(module.base_layer, known)) and f".base_layer{reason}"
    shape = module.__dict__.get("normalized_shape", ())
    return f" normalises over {len(shape)} dimensions" if len(shape) > 1 else None


class Inspection(NamedTuple):
    """Reasons against running the layers of a stack one by one, or on packed tokens; each may be None."""

    obstacle: str | None  # why the stack must run on padded batches
    must_be_called: str | None  # why a layer or attention must be called, with masks in torch's form
    layerwise_obstacle: str | None  # why running the layers one by one differs from calling them, global hooks aside
    mixing: str | None  # why a module may look at several tokens
    position_dependent: set[str]  # names of attention whose output depends on the distances between tokens
    batch_first: bool | None  # of the layers' attention; None if layers differ or do not state it


def inspect_stack(stack: Any) -> Inspection:
    """Inspect a stack, its layers and its norm."""
    reasons: dict[str, str] = {}
    batch_firsts: set[bool] = set()  # `set[bool]()` would break a graph of torch.compile
    position_dependent: set[str] = set()
    for index, layer in enumerate(stack.layers):
        modules, where = layer._modules, f"layers.{index}"
        foreign = not runs_composed(layer)
        for name in _ATTENTIONS:
            attention = getattr(layer, name, None) if foreign else modules.get(name)
            if hasattr(attention, "batch_first"):
                batch_firsts.add(attention.batch_first)  # type: ignore[union-attr]
        if foreign:
            override = " that overrides forward or a block" if hasattr(type(layer), "runs_packed") else ""
            reasons.setdefault("called", f"{where} is a {type(layer).__name__}{override}")
            continue
        if has_own_hooks(layer) and not is_sharded(layer):
            reasons.setdefault("called", f"{where} has hooks")
        unmodified = unmodified_children(layer, layer.part_types)
        for name, module in modules.items():
            if name not in _ATTENTIONS:
                if name not in unmodified:
                    _inspect(module, f"{where}.{name}", f"{where}.{name}", reasons)
            elif "runs_packed" not in vars(type(module)):
                reasons.setdefault("called", f"{where}.{name} is a {type(module).__name__}")
            else:
                if name not in unmodified and has_own_hooks(module):
                    reasons.setdefault("called", f"{where}.{name} has hooks")
                if module.counts_positions:
                    position_dependent.add(name)
                if module.bias_k is not None or module.add_zero_attn:
                    reasons.setdefault("mixing", f"{where}.{name} has add_bias_kv or add_zero_attn")
                unmodified_names = unmodified_children(module, module.part_types)
                for child_name, child in module._modules.items():
                    if child_name not in unmodified_names:  # a position bias sees no tokens
                        path = None if child_name == "position_bias" else f"{where}.{name}.{child_name}"
                        _inspect(child, f"{where}.{name}", path, reasons)
        function = None if isinstance(layer.activation, nn.Module) else layer.activation
        if function is not None and not (isinstance(function, Hashable) and function in TOKEN_WISE):
            reasons.setdefault("mixing", f"{where}.activation is a function that is not declared token_wise")
    if len(batch_firsts) > 1:
        reasons.setdefault("mixing", "the layers differ in batch_first")
    _inspect(stack.norm if isinstance(stack.norm, nn.Module) else None, "norm", "norm", reasons)
    if not len(stack.layers):
        reasons["hooked"] = "it has no layers, whose batch_first tells the order of dimensions"
    called, hooked, mixing = reasons.get("called"), reasons.get("hooked"), reasons.get("mixing")
    must_be_called = "layers.0 has hooks" if has_global_hooks() else called
    batch_first = batch_firsts.pop() if len(batch_firsts) == 1 else None
    obstacle = must_be_called or hooked or mixing
    return Inspection(obstacle, must_be_called, called, mixing, position_dependent, batch_first)


def check_layerwise(stack: Any, operation: str) -> Inspection:
    """Return a stack's inspection; raise if running its layers one by one differs from calling the stack.

    Raises:
        RuntimeError: the stack has no layers, or a module in it has hooks, another `forward` or sharded parameters. The
            message names `operation`, which runs the layers one by one.
    """
    if not len(stack.layers):
        raise RuntimeError(f"the stack has no layers, which {operation} needs")
    inspection = inspect_stack(stack)
    reason = "the stack has hooks" if has_own_hooks(stack) and not is_sharded(stack) else inspection.layerwise_obstacle
    if reason is not None:
        raise RuntimeError(f"{reason}, which {operation} does not call; calling the model does")
    modules = ("the stack", stack), *((f"layers.{index}", layer) for index, layer in enumerate(stack.layers))
    for name, module in modules:
        if is_sharded(module) and any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            raise RuntimeError(f"{name} is sharded, and {operation} does not gather parameters: call unshard() on it")
    return inspection


def _inspect(module: nn.Module | None, name: str, path: str | None, reasons: dict[str, str]) -> None:
    """Add the reasons of a module and the modules inside it; path: name of a module that sees tokens, else None."""
    if module is None:
        return
    if has_own_hooks(module):
        reasons.setdefault("hooked", f"{name} has hooks")
    if path is not None and (reason := mixing_reason(module)) is not None:
        reasons.setdefault("mixing", f"{path}{reason}")
    for child in module._modules.values():  # not `modules()`: there PEFT's attention detaches merged weights
        _inspect(child, name, None, reasons)
