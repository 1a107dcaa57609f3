"""What calling a module does beyond what its class says: hooks, and methods that somebody replaced.

An op works with the parameters of modules past their calls, so it asks this of every part, in every step.
"""

from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from fastformer.modes import compiling

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says, so that its parameters must not be used past it.

    An instance whose `forward` was replaced counts too: libraries that move weights between devices do that. So does a
    class, as some adapters replace that of nn.Linear, and a hook that torch calls for all modules.
    """
    return has_own_hooks(module) or has_global_hooks()


def has_global_hooks() -> bool:
    """Whether a call of any module does more: hooks of all, or somebody's methods in torch's base class."""
    base = nn.Module
    if base.__call__ is not _CALL or base._call_impl is not _CALL_IMPL:
        if not (_is_torchs(base.__call__) and _is_torchs(base._call_impl)):
            return True
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def _is_torchs(method: Any) -> bool:
    """Whether a method was defined in torch, by whose tracers others are put into its classes for a while.

    What it was wrapped in does not count, so that somebody's function in one of torch's is his.
    """
    while not (method is _CALL or method is _CALL_IMPL):
        if not str(getattr(method, "__globals__", {}).get("__name__", "")).startswith("torch."):
            return False
        method = getattr(method, "__wrapped__", None)
        if method is None:
            return True
    return True


def has_own_hooks(module: nn.Module) -> bool:
    """`has_hooks`, but for those of all modules: profilers and counters, which only look on."""
    state: dict[str, Any] = module.__dict__
    found = state.get  # written out: layers ask 50 times a step, and a generator takes 1 us each time
    hooks = found("_forward_hooks") or found("_forward_pre_hooks") or found("_backward_hooks")
    if hooks or found("_backward_pre_hooks") or "forward" in state or "_call_impl" in state:
        return True
    kind = type(module)
    if (kind.__call__ is not _CALL or kind._call_impl is not _CALL_IMPL) and _has_own_call(kind):
        return True
    if kind in _FORWARDS and kind.forward is not _FORWARDS[kind]:
        return True
    return compiling() and has_own(module, "forward")


def _has_own_call(kind: type[nn.Module]) -> bool:
    """Whether somebody's `__call__` is in a class, or in a base but nn.Module."""
    if kind is NonDynamicallyQuantizableLinear:  # whose weight torch reads: it does not call what nn.Linear has got
        return False
    both = ((getattr(kind, name), getattr(nn.Module, name)) for name in ("__call__", "_call_impl"))
    return any(its is not base and not _is_torchs(its) for its, base in both)


def has_own(module: nn.Module, *names: str) -> bool:
    """Whether an instance has one of these itself, such as a method in the place of its class's."""
    if compiling():  # Dynamo compiles anew where what it looked up has changed, and has not looked at a state
        for name in names:
            getattr(module, name, None)
    return any(name in module.__dict__ for name in names)


def torchs_own(kind: type[nn.Module], name: str = "forward") -> Any:
    """The method of a class of torch's; None where it was not defined in torch, but put there."""
    method = getattr(kind, name)
    where = getattr(method, "__globals__", {}).get("__name__", "")
    return method if where.startswith("torch.nn.") else None


_CALL, _CALL_IMPL = (torchs_own(nn.Module, name) for name in ("__call__", "_call_impl"))
_FORWARDS: dict[type[nn.Module], Any] = {
    kind: torchs_own(kind) for kind in (nn.Linear, nn.Dropout, nn.ReLU, nn.GELU, nn.LayerNorm, nn.RMSNorm)
}


def plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether the module does exactly what its class says, so that an op may work with its parameters."""
    return type(module) in types and not has_hooks(module)
