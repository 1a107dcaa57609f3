"""Relative biases of T5's kind, by distance in place of all pairs: `[H, 2 P - 1]`.

T5 makes its bias in the first layer and gives it to the others. UMT5 makes one in each attention, and zeros for the
cross attention, of as many pairs as there are tokens: while a layer runs packed, its attention makes it by distance.

Letters: H heads, L padded length, P positions.
"""

from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.integrations.transformers.arguments import parameters
from fastformer.integrations.transformers.masks import packed_rules
from fastformer.modes import recorded
from fastformer.packing import Layout

_INSIDE = "_packed_rules"  # in a part: the rules of each thread that runs it, None where it runs padded
_lock = Lock()


def makes_biases(part: nn.Module) -> bool:
    """Whether a part is an attention that makes its bias itself, be it one of zeros."""
    own = hasattr(part, "compute_bias") and hasattr(part, "has_relative_attention_bias")
    return own and "position_bias" not in parameters(part)


def by_distance(part: Any, layout: Layout, x: Tensor) -> Tensor:
    """The bias that a part makes, by its own function, for one query: `[H, 2 P - 1]`."""
    P = max(layout.max_length, 1)
    found: Tensor = type(part).compute_bias(part, 1, 2 * P - 1, device=x.device, past_seen_tokens=P - 1)
    return found[0, :, 0]


def of_layer(layer: nn.Module, layout: Layout, x: Tensor) -> Tensor:
    """The bias that a layer of T5 makes, or a number where the layers before it gave none."""
    part = next((part for part in layer.modules() if hasattr(part, "relative_attention_bias")), None)
    return x.new_zeros(1) if part is None else by_distance(part, layout, x)


def of_all_pairs(bias: Tensor, length: int) -> Tensor:
    """A bias by distance as T5's layers have it in padded batches: `[1, H, L, L]`."""
    at = torch.arange(length, device=bias.device)
    distances = at[None, :] - at[:, None] + (bias.shape[1] + 1) // 2 - 1
    return bias[:, distances.clamp(0, bias.shape[1] - 1)][None]


def enter(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention that makes its bias itself."""
    if recorded():
        return
    rules = packed_rules(args, kwargs)
    with _lock:
        part.__dict__.setdefault(_INSIDE, {})[get_ident()] = rules
        if rules is not None:
            part.__dict__.update(compute_bias=partial(_instead, part), has_relative_attention_bias=True)


def leave(part: nn.Module, *_: Any) -> None:
    """Forward hook of the same, called whatever happened: nothing stays."""
    if recorded():
        return
    with _lock:
        inside = part.__dict__.get(_INSIDE, {})
        inside.pop(get_ident(), None)
        if not inside:
            clear(part)


def clear(part: nn.Module) -> None:
    """Remove what calls have left in a part; Ctrl-C within one is told to no hook."""
    if part.__dict__.pop(_INSIDE, None) is not None and part.__dict__.pop("compute_bias", None):
        part.__dict__["has_relative_attention_bias"] = hasattr(part, "relative_attention_bias")


def _instead(part: Any, *sizes: int, device: torch.device, **options: Any) -> Tensor:
    rules = part.__dict__[_INSIDE].get(get_ident())
    if not hasattr(part, "relative_attention_bias"):
        return torch.zeros((1,) * (4 if rules is None else 1), device=device)
    if rules is None:  # of another thread, which runs padded
        return type(part).compute_bias(part, *sizes, device=device, **options)  # type: ignore[no-any-return]
    return by_distance(part, rules.layout, torch.zeros(1, device=device))
