"""What keeps a stack from running without padding, or from being taken apart: hooks, and parts that mix tokens.

A stack asks when it is called, since hooks and other parts may come at any time. Parts are declared to treat each token
alone by `token_wise`.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fastformer.nn.activations import DEFINED_HERE
from fastformer.nn.hooks import has_global_hooks, has_own_hooks, hooked_child
from fastformer.nn.modules import LayerNorm, RMSNorm
from fastformer.nn.wrappers import is_gathered, is_sharded, unwrap, wrapper_chain

MIXED_ORDERS = "the layers differ in batch_first"

T = TypeVar("T", bound=Callable[..., Any])

TOKEN_WISE: set[Any] = {
    nn.Linear, NonDynamicallyQuantizableLinear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU,
    nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish,
    F.relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.relu6, F.tanh, F.sigmoid, F.softplus,
    F.hardswish, torch.relu, torch.tanh, torch.sigmoid, LayerNorm, RMSNorm, *DEFINED_HERE,
}  # fmt: skip
_ADAPTERS = ("peft.tuners.lora.layer.Linear",)  # treat each token alone if their `base_layer` does


def token_wise(part: T) -> T:
    """Declare that a class of modules, or a function, treats each token alone; usable as a decorator. Returns it.

    Stacks with such parts then run without padding and decode with a cache: a part gets `[T, D]` in place of
    `[B, L, D]`. A linear layer with an adapter is token-wise, a convolution over positions is not. Nothing checks it.

    Args:
        part: a subclass of nn.Module, itself and not its subclasses; or an activation function, hashable.

    Raises:
        TypeError: it is neither.
    """
    of_modules = isinstance(part, type) and issubclass(part, nn.Module)
    if not (of_modules or (callable(part) and not isinstance(part, type | nn.Module))):
        name = part.__name__ if isinstance(part, type) else type(part).__name__
        raise TypeError(f"token_wise takes a class of modules or a function, not {name}")
    if not isinstance(part, Hashable):
        raise TypeError(f"token_wise takes functions that are hashable, not a {type(part).__name__}")
    TOKEN_WISE.add(part)
    return part


def mixes(part: Any, known: Collection[Any] = TOKEN_WISE) -> str | None:
    """Return why a part may look at several tokens, or None: its class treats each token alone, or was declared so."""
    kind = type(part)
    if not (kind in known or kind in TOKEN_WISE):
        part = unwrap(part)
        kind = type(part).__bases__[0] if is_parametrized(part) else type(part)
    if not (kind in known or kind in TOKEN_WISE):
        if f"{kind.__module__}.{kind.__qualname__}" not in _ADAPTERS:
            return f" is a {type(part).__name__}"
        reason = mixes(part.base_layer, known)
        return None if reason is None else f".base_layer{reason}"
    shape = getattr(part, "normalized_shape", ())
    return f" normalises over {len(shape)} dimensions" if len(shape) > 1 else None


def obstacle(stack: Any) -> str | None:
    """Return why the layers of a stack, or its norm, must see padded batches, or None.

    Hooks are one reason: they would see tokens in place of batches.
    """
    if not len(stack.layers):
        return "it has no layers, which say where the batch is"
    everywhere = has_global_hooks()
    for index, layer in enumerate(stack.layers):
        *_, inner = chain = wrapper_chain(layer)
        runs_packed = getattr(type(inner), "runs_packed", None)
        if not runs_packed:
            kind = type(inner).__name__
            return f"layers.{index} is a {kind}" + ("" if runs_packed is None else " with a part of its own")
        if everywhere or any(has_own_hooks(each) and not is_sharded(each) for each in chain):
            return f"layers.{index} has hooks"
        if (hooked := hooked_child(inner)) is not None:
            return f"layers.{index}.{hooked} has hooks"
        for name, part in inner._modules.items():
            if type(part) in TOKEN_WISE or part is None:
                continue
            if _has_hooks_inside(part):
                return f"layers.{index}.{name} has hooks"
            if not getattr(unwrap(part), "packs", True):
                return f"layers.{index}.{name} has add_bias_kv or add_zero_attn"
    if isinstance(stack.norm, nn.Module) and (everywhere or has_own_hooks(stack.norm)):
        return "norm has hooks"
    return MIXED_ORDERS if len(batch_orders(stack)) > 1 else mixing_part(stack)


def _has_hooks_inside(part: nn.Module) -> bool:
    """Return whether a module inside a part, that the part calls, has hooks."""
    # The children and not `modules()`: PEFT's attention detaches merged weights from its adapters in `named_modules`.
    if hooked_child(part) is not None:
        return True
    return any(_has_hooks_inside(child) for child in part._modules.values() if type(child) not in TOKEN_WISE and child)


def mixing_part(stack: Any) -> str | None:
    """Return which part of a stack, beside attention, may look at several tokens at once, or None."""
    for index, layer in enumerate(stack.layers):
        layer = unwrap(layer)
        for name, part in layer._modules.items():
            attention = part if type(part) in TOKEN_WISE else unwrap(part)
            if "runs_packed" not in vars(type(attention)):
                inner = [("", part)]
            else:
                own = attention._modules
                inner = [(f".{child}", own[child]) for child in ("out_proj", "q_norm", "k_norm") if own.get(child)]
            for child, module in inner:
                shape = module.__dict__.get("normalized_shape", ())
                if (type(module) not in TOKEN_WISE or len(shape) > 1) and (reason := mixes(module)) is not None:
                    return f"layers.{index}.{name}{child}{reason}"
        activation = layer.activation
        known = isinstance(activation, nn.Module) or (isinstance(activation, Hashable) and activation in TOKEN_WISE)
        if not known:
            return f"layers.{index}.activation is a function of your own"
    reason = mixes(stack.norm) if isinstance(stack.norm, nn.Module) else None
    return None if reason is None else f"norm{reason}"


def batch_orders(stack: Any) -> set[bool]:
    """Return what the attention modules of a stack say about `batch_first`."""
    parts: list[Any] = [
        getattr(layer, name, None) for layer in stack.layers for name in ("self_attn", "multihead_attn")
    ]
    return {part.batch_first for part in parts if hasattr(part, "batch_first")}


def check_apart(stack: Any, what: str) -> None:
    """Refuse to take a stack and its layers apart where calling the stack does more.

    Args:
        stack: of layers.
        what: takes the stack apart, for the message.

    Raises:
        RuntimeError: a part has hooks, a forward of its own or parameters that are not gathered, or there are no
            layers.
    """
    if not len(stack.layers):
        raise RuntimeError(f"the stack has no layers, of which {what} consists")
    parts: dict[str, Any] = {"the stack": stack}
    for index, layer in enumerate(stack.layers):
        parts[f"layers.{index}"] = layer
        for name in ("self_attn", "multihead_attn"):
            if hasattr(layer, name):
                parts[f"layers.{index}.{name}"] = getattr(layer, name)
    for name, part in parts.items():
        chain = wrapper_chain(part)
        for each in chain:
            if is_sharded(each):
                if not is_gathered(each):
                    raise RuntimeError(f"{name} holds a part of its parameters, and {what} gathers none: unshard() it")
            elif has_own_hooks(each):
                raise RuntimeError(f"{name} has hooks, which {what} does not call; calling the model does")
        if part is not stack and not getattr(type(chain[-1]), "runs_packed", False):
            kind = type(chain[-1]).__name__
            raise RuntimeError(f"{name} is a {kind}, which {what} does not call; calling the model does")


def sees_calls(stack: Any, everywhere: bool = True) -> bool:
    """Return whether hooks or replaced modules see with which arguments layers, or attention in them, are called.

    everywhere: whether hooks that torch calls for all modules count.
    """
    if everywhere and has_global_hooks():
        return True
    for layer in stack.layers:
        *_, inner = chain = wrapper_chain(layer)
        if not getattr(type(inner), "runs_packed", False):
            return True
        if any(has_own_hooks(each) and not is_sharded(each) for each in chain):
            return True
        for name in ("self_attn", "multihead_attn"):
            attention = inner._modules.get(name)
            if attention is not None:
                chain = wrapper_chain(attention)
                if "runs_packed" not in vars(type(chain[-1])) or any(map(has_own_hooks, chain)):
                    return True
    return False
