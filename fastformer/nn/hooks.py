"""Hooks: whether an op may work with the parameters of a module without calling the module."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a `forward` in its instance, as accelerate puts one there."""
    state = module.__dict__  # read without getattr: layers ask often
    hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
    return bool(hooks or state.get("_backward_pre_hooks") or "forward" in state)


def has_global_hooks() -> bool:
    """Return whether torch calls hooks for all modules."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, or torch calls hooks for all modules."""
    return has_own_hooks(module) or has_global_hooks()


def plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Return whether a module is of one of the types, not of a subclass, and has no hooks."""
    return type(module) in types and not has_hooks(module)


def plain_parts(module: nn.Module, types: Mapping[str, tuple[type[nn.Module], ...]]) -> set[str]:
    """Return the names of the children that are of the types given for the name, and have no hooks."""
    if has_global_hooks():
        return set()
    found: set[str] = set()
    children: Any = module._modules
    for name, part in children.items():
        if type(part) in types.get(name, ()):
            state = part.__dict__  # as `has_own_hooks`, without a call for each part
            hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
            if not (hooks or state.get("_backward_pre_hooks") or "forward" in state):
                found.add(name)
    return found


def hooked_child(module: nn.Module) -> str | None:
    """Return the name of a child with hooks, or None."""
    for name, part in module._modules.items():
        if part is not None:
            state = part.__dict__
            hooks = state.get("_forward_hooks") or state.get("_forward_pre_hooks") or state.get("_backward_hooks")
            if hooks or state.get("_backward_pre_hooks") or "forward" in state:
                return name
    return None
