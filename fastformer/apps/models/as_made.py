"""Whether a model still is what its settings make: what is taken from one are settings and weights, and nothing else.

A hook, a part that was replaced, an epsilon that was set by hand: a conversion or an export would pass it over without
a word, and compute something else.
"""

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fastformer.nn.hooks import HOOKS
from fastformer.nn.rotary import Rotary

_PLAIN = bool, int, float, str, tuple, type(None), Rotary, FunctionType, BuiltinFunctionType
# Hooks and forwards that change no number: of models of transformers without padding, and gradient checkpointing.
_HARMLESS = "fastformer.", "transformers.modeling_utils"
# What changes none either, and what the shapes of weights say.
_IDLE = frozenset({"training", "gradient_checkpointing", "padding_free", "checkpoint_activations", "vocab_size"})


class _NoWeights(TorchFunctionMode):
    """Parameters are made on "meta"; what is computed, such as tables of positions, is there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return function(*args, **(kwargs or {}))


def check_as_made(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Refuse a model that has more of its own than weights.

    Args:
        model: to be converted or exported. It may be of a subclass that has the same forward.
        make: makes such a model of its settings.

    Raises:
        ValueError: naming the part and what it has of its own.
    """
    with _NoWeights(), torch.random.fork_rng([]):
        made = make()
    parts, expected = (dict(each.named_modules(remove_duplicate=False)) for each in (model, made))
    for name, part in parts.items():
        other = expected.get(name)
        reason = "is not of its settings" if other is None else _difference(part, other, root=not name)
        if reason is not None:
            raise ValueError(f"{name or type(model).__name__} {reason}, and only settings and weights are taken over")
    if missing := expected.keys() - parts.keys():
        raise ValueError(f"{min(missing)} is missing, which its settings ask for")


def _is_harmless(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_HARMLESS)


def _difference(part: nn.Module, made: nn.Module, root: bool) -> str | None:
    if type(part) is not type(made) and not (root and type(part).forward is type(made).forward):
        return f"is a {type(part).__name__}, not a {type(made).__name__}"
    if "forward" in part.__dict__ and not _is_harmless(getattr(part.__dict__["forward"], "func", None)):
        return "has a forward of its own"
    if not all(_is_harmless(hook) for kind in HOOKS for hook in getattr(part, kind).values()):
        return "has hooks"
    own, its = vars(part), vars(made)
    for name in sorted(own.keys() & its.keys() - _IDLE):
        x, y = own[name], its[name]
        if not name.startswith("_") and isinstance(x, _PLAIN) and isinstance(y, _PLAIN) and x != y:
            x, y = (getattr(value, "__name__", repr(value)) for value in (x, y))
            return f"has {name}={x}, not {y}"
    for name in made._non_persistent_buffers_set & part._buffers.keys():
        table, found = made._buffers[name], part._buffers[name]
        # A table that grows with what is read may be longer.
        if table is None or found is None or table.is_meta or found.is_meta or table.shape != found.shape:
            continue
        if not torch.allclose(found.to(table.device), table.to(found.dtype)):
            return f"has numbers of its own in {name}"
    return None
