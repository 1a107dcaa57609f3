"""What a stack asks before it runs without padding or with a cache: may its layers, where are the tokens, which mask is
causal.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fastformer.modes import has_values, readable
from fastformer.nn.activations import DEFINED_HERE
from fastformer.nn.hooks import has_hooks, has_own_hooks
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import LayerNorm, RMSNorm
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.torch_calls import ahead
from fastformer.nn.wrappers import is_gathered, is_sharded, levels, unwrap
from fastformer.packing import Layout, pack, unpack

# What works on each token alone, so that it may see `[T, D]` in place of `[B, L, D]`.
_NORMS = (nn.LayerNorm, LayerNorm, nn.RMSNorm, RMSNorm, nn.Identity)
_ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Hardswish, nn.Identity,
)  # fmt: skip
_FUNCTIONS = (
    F.relu, F.gelu, F.silu, F.mish, F.elu, F.celu, F.selu, F.leaky_relu, F.relu6, F.tanh, F.sigmoid, F.softplus,
    F.hardswish, torch.relu, torch.tanh, torch.sigmoid, *DEFINED_HERE,
)  # fmt: skip
_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
TOKEN_WISE = (*_LINEAR, nn.Dropout, *_NORMS, *_ACTIVATIONS)

_DIFFER = "the layers differ in batch_first"

T = TypeVar("T", bound=Callable[..., Any])

_declared: set[object] = set()
# Classes of other libraries, which need not be installed: token-wise if what they adapt, `base_layer`, is.
_ELSEWHERE = {"peft.tuners.lora.layer.Linear"}


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
    function = callable(part) and not isinstance(part, type | nn.Module)
    if not (of_modules or function):
        said = part.__name__ if isinstance(part, type) else type(part).__name__
        raise TypeError(f"token_wise takes a class of modules or a function, not {said}")
    if not isinstance(part, Hashable):
        raise TypeError(f"token_wise takes functions that are hashable, not a {type(part).__name__}")
    _declared.add(part)
    return part


def mixes_tokens(stack: nn.Module) -> str | None:
    """Return which part of a stack, beside attention, may look at several tokens at once, or None."""
    layers: Any = stack.layers
    reasons = {f"layers.{index}": _layer_mixes(layer) for index, layer in enumerate(layers)}
    reasons["norm"] = mixes(stack.norm, _NORMS) if isinstance(stack.norm, nn.Module) else None
    return next((f"{name}{reason}" for name, reason in reasons.items() if reason is not None), None)


def _layer_mixes(layer: Any) -> str | None:
    layer = unwrap(layer)
    for name, part in layer.named_children():
        reason = mixes(part, (*TOKEN_WISE, MultiheadAttention))
        if reason is not None:
            return f".{name}{reason}"
        inner = unwrap(part)
        if isinstance(inner, MultiheadAttention) and (reason := mixes(inner.out_proj, _LINEAR)) is not None:
            return f".{name}.out_proj{reason}"
        for its in ("q_norm", "k_norm") if isinstance(inner, MultiheadAttention) else ():
            norm = inner._modules.get(its)
            if norm is not None and (reason := mixes(norm, _NORMS)) is not None:
                return f".{name}.{its}{reason}"
    activation = layer.activation
    own = not isinstance(activation, nn.Module) and activation not in (*_FUNCTIONS, *_declared)
    return ".activation is a function of your own" if own else None


def mixes(part: Any, known: tuple[type[nn.Module], ...]) -> str | None:
    """Return why a part may not see tokens in place of batches, or None: it is of a known class, or was declared."""
    kind = type(part)
    if not (kind in known or kind in _declared):
        part = unwrap(part)
        kind = type(part).__bases__[0] if is_parametrized(part) else type(part)  # a class that torch made of the part's
    if not (kind in known or kind in _declared):
        if f"{kind.__module__}.{kind.__qualname__}" not in _ELSEWHERE:
            return f" is a {type(part).__name__}"
        reason = mixes(part.base_layer, known)
        return None if reason is None else f".base_layer{reason}"
    shape = part.normalized_shape if kind in _NORMS and kind is not nn.Identity else ()
    return f" normalises over {len(shape)} dimensions" if len(shape) > 1 else None


def orders_of(stack: nn.Module) -> set[bool]:
    """What the attention modules of a stack say of `batch_first`."""
    layers: Any = stack.layers
    parts: list[Any] = [getattr(layer, name, None) for layer in layers for name in ("self_attn", "multihead_attn")]
    return {part.batch_first for part in parts if hasattr(part, "batch_first")}


def obstacle(stack: nn.Module) -> str | None:
    """Return why the layers of a stack, or its norm, must see padded batches, or None.

    Hooks are one reason: they would see tokens in place of batches.
    """
    layers: Any = stack.layers
    if not len(layers):
        return "it has no layers, which say where the batch is"
    for index, layer in enumerate(layers):
        reason = _layer_obstacle(layer)
        if reason is not None:
            return f"layers.{index}{reason}"
    if isinstance(stack.norm, nn.Module) and has_hooks(stack.norm):
        return "norm has hooks"
    if len(orders_of(stack)) > 1:
        return _DIFFER
    return mixes_tokens(stack)


def _layer_obstacle(layer: Any) -> str | None:
    outside, layer = layer, unwrap(layer)
    if not isinstance(layer, TransformerEncoderLayer | TransformerDecoderLayer):
        return f" is a {type(layer).__name__}"
    if layer.overridden:
        return f" is a {type(layer).__name__} with a part of its own"
    if any(has_hooks(level) and not is_sharded(level) for level in levels(outside)):
        return " has hooks"
    for name, part in layer.named_children():
        if _has_hooks_within(part):
            return f".{name} has hooks"
        part = unwrap(part)
        if isinstance(part, MultiheadAttention) and not part.packs:
            return f".{name} has add_bias_kv or add_zero_attn"
    return None


def _has_hooks_within(part: Any) -> bool:
    """Return whether a part has hooks, or a module inside it that it calls."""
    # `children` and not `modules`: PEFT's attention detaches merged weights from its adapters in `named_modules`.
    return has_hooks(part) or (type(part) not in TOKEN_WISE and any(map(_has_hooks_within, part.children())))


class PackedInput(NamedTuple):
    """The source or the target side of a padded batch: how its tensors become tokens, and tokens such tensors."""

    layout: Layout
    batch_first: bool
    batched: bool

    def pack(self, x: Tensor) -> Tensor:
        """Take the real tokens: `[T, D]`."""
        x = x if self.batched else x.unsqueeze(0 if self.batch_first else 1)
        return pack(x, self.layout, self.batch_first)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Put tokens back, zeros in place of padding."""
        x = unpack(tokens, self.layout, self.batch_first)
        return x if self.batched else x.squeeze(0 if self.batch_first else 1)


def hidden_keys(padding: Tensor) -> Tensor | None:
    """Return a key padding mask as bool, True = padding; None where it says something else or cannot be looked at.

    Additive masks of 0 and -inf are read, too.
    """
    if not has_values(padding):
        return None
    if padding.dtype == torch.bool:
        return padding
    if not padding.is_floating_point() or padding.requires_grad:
        return None
    hidden = padding == float("-inf")
    return None if bool(((padding != 0) & ~hidden).any()) else hidden


def read_side(
    x: Tensor,
    padding: Tensor | None,
    batch_first: bool | None,
    counts_positions: bool = False,
    from_start: bool = False,
) -> PackedInput | None:
    """Read where the tokens of x `[B, L, D]`, `[L, B, D]` or `[L, D]` lie.

    Args:
        x: a padded batch.
        padding: its key padding mask as in torch, `[B, L]` or `[L]`; None for no padding.
        batch_first: the order of the dimensions; None if unknown.
        counts_positions: whether tokens must stay as far apart as they are, so that no padding may lie between them.
        from_start: whether they must stay as far from the first column, as where attention to a memory counts
            positions, so that no padding may lie on the left either.

    Returns:
        None where this cannot run without padding, or does not fit together: the padded way then says what is wrong.
    """
    batched = x.dim() == 3
    if x.dim() not in (2, 3) or batch_first is None:
        return None
    B, L = (1, x.shape[0]) if not batched else x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    if padding is None:
        return PackedInput(Layout.from_lengths([L] * B, x.device, L), batch_first, batched)
    if not isinstance(padding, Tensor) or padding.shape != ((B, L) if batched else (L,)):
        return None
    hidden = hidden_keys(padding)
    if hidden is None:
        return None
    layout = Layout.from_mask(hidden.view(B, L))
    if (counts_positions and layout.has_gaps) or (from_start and not layout.starts_rows):
        return None
    return PackedInput(layout.to(x.device), batch_first, batched)


def same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two key padding masks are given and hide the same keys."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and has_values(one) and has_values(other) and torch.equal(one, other)


def is_causal_mask(mask: Tensor | None, stated: bool, length: int) -> bool:
    """Whether an attn_mask `[L, L]` hides what comes later and nothing else: `stated` by the caller, or seen.

    A mask that does not fit is none, so that its check comes; one that learns is none, so that its gradient does.
    """
    if mask is None:
        return stated
    if not isinstance(mask, Tensor) or mask.shape != (length, length) or mask.requires_grad:
        return False
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return False
    if stated:
        return True
    if not has_values(mask):
        return False
    later = ahead(length, length, mask.device)
    if mask.dtype == torch.bool:
        return torch.equal(mask, later)
    return torch.equal(mask == float("-inf"), later) and not bool(mask.tril().any())


def zero_padding(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor:
    """Set the rows of a padded output to 0 where its mask says True or -inf, as a packed run does.

    Returns x as it is where `_hidden_rows` has no mask for it.
    """
    hidden = _hidden_rows(x, padding, batch_first)
    return x if hidden is None else x.masked_fill(hidden, 0.0)


def finite_padding(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor:
    """Set NaN and inf to 0 in the padded rows of x, where a packed run reads nothing.

    Attention and the gradients of weights multiply padded rows by 0, and 0 * NaN is NaN.
    """
    hidden = _hidden_rows(x, padding, batch_first)
    if hidden is None or (readable(x) and math.isfinite(x.detach().sum().item())):
        return x
    return x.masked_fill(hidden & ~x.isfinite(), 0.0)


def _hidden_rows(x: Tensor, padding: Tensor | None, batch_first: bool | None) -> Tensor | None:
    """Return where a padding mask hides rows of x, as bool `[..., 1]`.

    None without a mask, where the layers do not state batch_first, where the mask does not fit x (which layers that
    take it did not look at), and where x is no padded tensor.
    """
    if not isinstance(padding, Tensor) or batch_first is None or not isinstance(x, Tensor) or x.is_nested:
        return None
    # A copy of a bool mask: the caller may change the mask before the backward pass.
    hidden = padding.clone() if padding.dtype == torch.bool else padding == float("-inf")
    hidden = hidden if padding.dim() == 1 or batch_first else hidden.mT
    return hidden[..., None] if hidden.shape == x.shape[:-1] else None


_FORWARDS = tuple(cls.forward for cls in (TransformerEncoderLayer, TransformerDecoderLayer, MultiheadAttention))


def _forward(part: nn.Module) -> Any:
    """The forward of its class; those of torch.jit have none."""
    return getattr(type(part), "forward", None)


def check_apart(stack: Any, what: str) -> None:
    """Refuse to take a stack and its layers apart where calling one does more.

    Args:
        stack: of layers.
        what: takes them apart, for the message.

    Raises:
        RuntimeError: one has hooks, a forward of its own or parameters that are not gathered, or there are no layers.
    """
    if not len(stack.layers):
        raise RuntimeError(f"the stack has no layers, of which {what} consists")
    calling = f"which {what} does not call; calling the model does"
    parts: dict[str, Any] = {"the stack": stack}
    for i, layer in enumerate(stack.layers):
        parts[f"layers.{i}"] = layer
        named = ("self_attn", "multihead_attn")
        parts |= {f"layers.{i}.{its}": getattr(layer, its) for its in named if hasattr(layer, its)}
    for name, part in parts.items():
        for level in levels(part):
            if is_sharded(level):
                if not is_gathered(level):
                    raise RuntimeError(f"{name} holds a part of its parameters, and {what} gathers none: unshard() it")
            elif has_own_hooks(level):
                raise RuntimeError(f"{name} has hooks, {calling}")
        part = unwrap(part)
        if part is not stack and (_forward(part) not in _FORWARDS or getattr(part, "has_own_blocks", False)):
            raise RuntimeError(f"{name} is a {type(part).__name__}, {calling}")


def may_do_more(stack: Any) -> bool:
    """Whether `check_apart` must look; 1 us a layer, for every step."""
    if has_own_hooks(stack):
        return True
    for layer in stack.layers:
        parts = layer.__dict__["_modules"]
        for part in (layer, parts.get("self_attn"), parts.get("multihead_attn")):
            if part is not None and (_forward(part) not in _FORWARDS or has_own_hooks(part)):
                return True
    return False


def check_cached(stack: Any) -> None:
    """Refuse to read with a cache where that would be something else than calling the stack.

    Raises:
        RuntimeError: a part has hooks or a forward of its own, or may look at several positions at once.
    """
    check_apart(stack, "decoding with a cache")
    if len(orders_of(stack)) > 1:
        raise RuntimeError(f"{_DIFFER}: what is a row to one is a position to another, and a step reads rows")
    for i, layer in enumerate(stack.layers):
        for part in map(unwrap, unwrap(layer).attentions):
            if not part.packs:
                raise RuntimeError(f"attention in layers.{i} has add_bias_kv or add_zero_attn, whose keys no step has")
        cross = unwrap(getattr(unwrap(layer), "multihead_attn", None))
        if cross is not None and cross.counts_positions:
            raise RuntimeError(f"attention to the memory in layers.{i} counts positions, which no step knows there")
    reason = mixes_tokens(stack)
    if reason is not None:
        raise RuntimeError(f"{reason}: it may look at several positions; fastformer.token_wise says that it does not")
