"""Predicates about stacks and their parts: hooks, replaced parts, sharded parameters, parts that mix tokens.

A stack asks once in each call. It runs packed unless a hook, a replaced `forward`, a subclass, or a part that is not
declared `token_wise` may look at the whole batch.
"""

import sys
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import is_parametrized

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TOKEN_WISE: set[Any] = {
    nn.Linear, NonDynamicallyQuantizableLinear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU,
    nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
    F.relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.relu6, F.tanh, F.sigmoid, F.softplus,
    F.hardswish, torch.relu, torch.tanh, torch.sigmoid,
}  # fmt: skip
_ADAPTERS = ("peft.tuners.lora.layer.Linear",)  # treat each token alone if their `base_layer` does
_ATTENTIONS = ("self_attn", "multihead_attn")


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a `forward` in its instance, as accelerate puts one there."""
    state = module.__dict__
    hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
    return bool(hooks or state.get("_backward_pre_hooks") or "forward" in state)


def has_global_hooks() -> bool:
    """Return whether torch calls hooks for all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has sharded a module's parameters, and the module has no other hooks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return False
    hooks = [hook for name in HOOKS for hook in module.__dict__[name].values()]
    return all(type(getattr(hook, "__self__", None)).__name__ == "FSDPState" for hook in hooks)


def plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Return whether a module is of one of the types, not of a subclass, and has no hooks: an op may replace it."""
    return type(module) in types and not (has_own_hooks(module) or has_global_hooks())


def plain_parts(module: nn.Module, types: Mapping[str, tuple[type[nn.Module], ...]]) -> set[str]:
    """Return the names of the children that are `plain`, of the types given for each name; norms of one dimension."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return set()
    found: set[str] = set()
    for name, part in module._modules.items():
        if type(part) in types.get(name, ()):
            state = part.__dict__  # as `has_own_hooks`, without a call for each part
            hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
            changed = hooks or state.get("_backward_pre_hooks") or "forward" in state
            if not changed and len(state.get("normalized_shape", ())) < 2:
                found.add(name)
    return found


def mixing_reason(part: Any, known: Collection[Any] = ()) -> str | None:
    """Return why a part may look at several tokens; None if its class is in TOKEN_WISE or `known`."""
    kind = type(part).__bases__[0] if is_parametrized(part) else type(part)
    if kind not in TOKEN_WISE and kind not in known:
        if f"{kind.__module__}.{kind.__qualname__}" not in _ADAPTERS:
            return f" is a {type(part).__name__}"
        return (reason := mixing_reason(part.base_layer, known)) and f".base_layer{reason}"
    shape = getattr(part, "normalized_shape", ())
    return f" normalises over {len(shape)} dimensions" if len(shape) > 1 else None


class Inspection(NamedTuple):
    """What stands in the way of taking a stack apart; each reason may be None."""

    obstacle: str | None  # why the stack must see padded batches
    called: str | None  # which layer or attention must be called as torch calls it, with masks in torch's form
    mixing: str | None  # which part may look at several tokens
    counting: set[str]  # the names of attention to which it matters how far apart tokens stand
    batch_first: bool | None  # as the attention of the layers states it; None where layers differ, or state none


def inspect_stack(stack: Any, everywhere: bool = True) -> Inspection:
    """Inspect the layers of a stack, and its norm; everywhere: whether hooks that torch calls for all modules count."""
    reasons = {"called": "layers.0 has hooks"} if everywhere and has_global_hooks() else {}
    orders: set[bool] = set()  # `set[bool]()` would end a graph of torch.compile
    counting: set[str] = set()
    for index, layer in enumerate(stack.layers):
        own, where = layer._modules, f"layers.{index}"
        foreign = not getattr(type(layer), "runs_packed", False)
        for name in _ATTENTIONS:
            attention = getattr(layer, name, None) if foreign else own.get(name)
            if hasattr(attention, "batch_first"):
                orders.add(attention.batch_first)  # type: ignore[union-attr]
        if foreign:
            own_part = " with a part of its own" if hasattr(type(layer), "runs_packed") else ""
            reasons.setdefault("called", f"{where} is a {type(layer).__name__}{own_part}")
            continue
        if has_own_hooks(layer) and not is_sharded(layer):
            reasons.setdefault("called", f"{where} has hooks")
        unmodified = plain_parts(layer, layer.part_types)
        for name, part in own.items():
            if name not in _ATTENTIONS:
                if name not in unmodified:
                    _inspect(part, f"{where}.{name}", f"{where}.{name}", reasons)
            elif "runs_packed" not in vars(type(part)):
                reasons.setdefault("called", f"{where}.{name} is a {type(part).__name__}")
            else:
                if name not in unmodified and has_own_hooks(part):
                    reasons.setdefault("called", f"{where}.{name} has hooks")
                if part.counts_positions:
                    counting.add(name)
                if part.bias_k is not None or part.add_zero_attn:
                    reasons.setdefault("mixing", f"{where}.{name} has add_bias_kv or add_zero_attn")
                unmodified_inside = plain_parts(part, part.part_types)
                for child, module in part._modules.items():
                    if child not in unmodified_inside:  # a position bias sees no tokens
                        path = None if child == "position_bias" else f"{where}.{name}.{child}"
                        _inspect(module, f"{where}.{name}", path, reasons)
        function = None if isinstance(layer.activation, nn.Module) else layer.activation
        if function is not None and not (isinstance(function, Hashable) and function in TOKEN_WISE):
            reasons.setdefault("mixing", f"{where}.activation is a function of your own")
    if len(orders) > 1:
        reasons.setdefault("mixing", "the layers differ in batch_first")
    _inspect(stack.norm if isinstance(stack.norm, nn.Module) else None, "norm", "norm", reasons)
    if not len(stack.layers):
        reasons["hooked"] = "it has no layers, which say where the batch is"
    called, hooked, mixing = reasons.get("called"), reasons.get("hooked"), reasons.get("mixing")
    order = orders.pop() if len(orders) == 1 else None
    return Inspection(called or hooked or mixing, called, mixing, counting, order)


def _inspect(part: nn.Module | None, name: str, path: str | None, reasons: dict[str, str]) -> None:
    """Add what a part, or a module inside it, gives as reasons; path: of a part that sees tokens."""
    if part is None:
        return
    if has_own_hooks(part):
        reasons.setdefault("hooked", f"{name} has hooks")
    if path is not None and (reason := mixing_reason(part)) is not None:
        reasons.setdefault("mixing", f"{path}{reason}")
    for child in part._modules.values():  # in `modules()`, PEFT's attention detaches merged weights from adapters
        _inspect(child, name, None, reasons)
