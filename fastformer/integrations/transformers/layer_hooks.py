"""What a packed stack of a Hugging Face model does around each of its layers: the hooks of `padding_free`.

Before a layer, its padded arguments become those of one sequence of N tokens, and its mask a `PackedRules`, which tells
the attention where sequences lie; after the last layer the tokens go back, zeros in place of padding. Each layer
decides for itself whether it runs packed, by its own arguments: which form its input has shows in the shape, so that
nothing is remembered between layers, a layer may be computed again, and one that cannot run packed unpacks first.

The hooks are functions of this module, so that models with them can be pickled and copied.

Letters: B batch, L padded length, D model width, H heads, P positions, N tokens.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils.output_capturing import _active_collector

from fastformer.integrations.transformers.caches import takes, unpacking
from fastformer.integrations.transformers.masks import MaskRules
from fastformer.modes import has_values, recorded
from fastformer.packing import Layout, pack, unpack

MASK, STATES, STATES_MASK = "attention_mask", "encoder_hidden_states", "encoder_attention_mask"
CACHES = ("past_key_values", "layer_past")  # one of them
BIAS, CROSS_BIAS = "position_bias", "encoder_decoder_position_bias"
# Tensors with a row for each token, [B, L, ...] or [1, L, ...], or tuples of such, and how many dimensions they have.
BY_TOKEN = {"position_ids": 2, "position_embeddings": 3, "per_layer_input": 3}
# What a layer may be given beside these: no numbers of tokens, or none that a layer computes with.
OTHERS = {
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "cache_position",
    "return_dict",
    "num_items_in_batch",
}
KNOWN = {MASK, STATES, STATES_MASK, *CACHES, BIAS, CROSS_BIAS, *BY_TOKEN, *OTHERS}
# Who may register hooks within a layer: they look at no batch.
_LOOK_AT_NO_BATCH = ("transformers.", "torch.distributed.", "fastformer.", "accelerate.", "deepspeed.")


class PackedRules(MaskRules):
    """Rules of a batch that `padding_free` packed: queries of `layout`, keys of `key_layout`."""


def parameters(layer: nn.Module) -> tuple[str, ...]:
    """The names of what a layer's forward takes by position."""
    cls: Any = type(layer)
    return _parameters(cls)


@cache
def _parameters(cls: Any) -> tuple[str, ...]:
    its = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in its if p.kind is p.POSITIONAL_OR_KEYWORD)


def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of every layer."""
    if recorded():
        return None
    names = parameters(layer)
    given = dict(zip(names, args, strict=False)) | kwargs
    rules, x = given.get(MASK), given.get(names[0])
    if len(args) > len(names) or type(rules) is not MaskRules or rules.key_mask is None or not isinstance(x, Tensor):
        return None
    if x.dim() != 3 or rules.mask is not None or rules.layout is not None:
        return None
    if not (has_values(rules.key_mask) and has_values(x)):
        return None
    layout = rules.real_keys(x.device)
    padded = x.shape[:2] == (rules.shape[0], rules.shape[2])
    if not padded and x.shape[:2] != (1, layout.total):
        return None
    if _may_pack(layer, names[0], given, rules, layout):
        changed = _packed(layer, names[0], given, rules, layout, padded)
    elif padded:
        return None
    else:
        changed = _unpacked(names[0], given, layout)
    given.update(changed)
    values = list(given.values())
    return tuple(values[: len(args)]), {name: given[name] for name in list(given)[len(args) :]}


def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the last layer: put the tokens back."""
    rules = next((x for x in (*args, *kwargs.values()) if isinstance(x, PackedRules)), None)
    if rules is None or rules.layout is None:
        return None
    if isinstance(output, Tensor):
        return unpack(output[0], rules.layout)
    return (unpack(output[0][0], rules.layout), *output[1:])


def check_left(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a stack's owner: raise where tokens were not put back, because the last layer did not run."""
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1), None)
    found = output[0] if isinstance(output, tuple | OrderedDict) and len(output) else output
    if given is None or not isinstance(found, Tensor) or found.dim() != 3:
        return
    if found.shape[0] == 1 and given.shape[0] > 1:
        raise RuntimeError(
            f"the last layer of {type(owner).__name__} did not run, so its tokens are still packed; "
            "fastformer.integrations.transformers.padded(model) before layers are left out"
        )


def _may_pack(layer: nn.Module, first: str, given: dict[str, Any], rules: MaskRules, layout: Layout) -> bool:
    """Whether one call of a layer can run packed."""
    B, _, T, S = rules.shape
    if T != S or rules.used != S or layout.total == B * S or layout.total == 0:
        return False  # a cache that holds something, or no padding
    if _active_collector.get() or given.get("output_attentions") or foreign_hooks(layer):
        return False
    if not all(takes(given.get(name)) for name in CACHES):
        return False
    if getattr(layer, "chunk_size_feed_forward", 0):
        return False
    for name, value in given.items():
        if name in BY_TOKEN:
            if any(x.dim() != BY_TOKEN[name] or x.shape[0] not in (1, B) or x.shape[1] != S for x in _tensors(value)):
                return False
        elif name not in KNOWN and name != first and any(True for _ in _tensors(value)):
            return False
    bias, states, states_mask = given.get(BIAS), given.get(STATES), given.get(STATES_MASK)
    if bias is not None and bias.dim() != 2:
        return False  # made by a layer that ran padded
    if (rules.window is not None or BIAS in parameters(layer)) and layout.has_gaps:
        return False
    if states is None:
        return True
    if states_mask is None:
        return bool(states.dim() == 3 and states.shape[0] == B)
    over_pairs = not isinstance(states_mask, MaskRules) or states_mask.mask is not None or states_mask.causal
    return not over_pairs and states_mask.used == states_mask.shape[3] == states.shape[1] and states.shape[0] == B


def _packed(
    layer: nn.Module, first: str, given: dict[str, Any], rules: MaskRules, layout: Layout, padded: bool
) -> dict[str, Any]:
    """The arguments of a layer that are others where it runs packed."""
    changed: dict[str, Any] = {}
    if padded:
        changed[first] = pack(given[first], layout)[None]  # [1, N, D]
    for name in BY_TOKEN:
        if given.get(name) is not None:
            changed[name] = _by_token(given[name], layout, rules)
    changed[MASK] = PackedRules(
        rules.shape, rules.used, causal=rules.causal, window=rules.window, layout=layout, key_layout=layout
    )
    states, key_layout = given.get(STATES), layout
    if states is not None:
        its = given.get(STATES_MASK)
        if its is None:
            S = states.shape[1]
            its = rules.once(("all keys", S), lambda: MaskRules((*rules.shape[:3], S), S))
        key_layout = its.real_keys(states.device)
        changed[STATES] = _states(layer, states, key_layout, rules)
        changed[STATES_MASK] = PackedRules(its.shape, its.used, layout=layout, key_layout=key_layout)
    for name in CACHES:
        if given.get(name) is not None:
            changed[name] = unpacking(given[name], layout, key_layout)
    if BIAS in parameters(layer) and given.get(BIAS) is None:
        changed[BIAS] = _bias(layer, given[first], layout)
    if CROSS_BIAS in parameters(layer) and given.get(CROSS_BIAS) is None:
        changed[CROSS_BIAS] = given[first].new_zeros(1)  # T5 would make zeros of all pairs
    return changed


def _unpacked(first: str, given: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The same of a layer that cannot run packed, after one that did."""
    changed: dict[str, Any] = {first: unpack(given[first][0], layout)}
    bias = given.get(BIAS)
    if bias is not None and bias.dim() == 2:
        L = layout.columns
        at = torch.arange(L, device=bias.device)
        distances = at[None, :] - at[:, None] + (bias.shape[1] + 1) // 2 - 1
        changed[BIAS] = bias[:, distances.clamp(0, bias.shape[1] - 1)][None]  # [1, H, L, L]
    return changed


def _bias(layer: nn.Module, x: Tensor, layout: Layout) -> Tensor:
    """T5's relative bias by distance, `[H, 2 P - 1]`, by the layer's own function, for one query."""
    its: Any = next((part for part in layer.modules() if hasattr(part, "relative_attention_bias")), None)
    if its is None:  # the layers before it gave none
        return x.new_zeros(1)
    P = max(layout.max_length, 1)
    found: Tensor = its.compute_bias(1, 2 * P - 1, device=x.device, past_seen_tokens=P - 1)
    return found[0, :, 0]


def _states(layer: Any, states: Tensor, layout: Layout, rules: MaskRules) -> Tensor:
    """Pack the encoder's states, once for all layers where none of them is computed again."""
    if getattr(layer, "gradient_checkpointing", False) and layer.training and states.requires_grad:
        return pack(states, layout)[None]
    return _once(states, layout, rules)


def _by_token(value: Any, layout: Layout, rules: MaskRules) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_by_token(x, layout, rules) for x in value)
    return _once(value, layout, rules)


def _once(x: Tensor, layout: Layout, rules: MaskRules) -> Tensor:
    """Take the rows of real tokens out of `[B, L, ...]` or `[1, L, ...]`: `[1, N, ...]`."""

    def make() -> tuple[Tensor, Tensor]:
        if x.shape[0] == layout.batch:
            return x, pack(x, layout)[None]
        return x, x.index_select(1, layout.origin % layout.columns)

    return rules.once((id(x), torch.is_grad_enabled()), make)[1]  # x is kept, so that no other has its id


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, but for numbers."""
    if isinstance(value, Tensor) and value.dim() > 0:
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)


def foreign_hooks(layer: nn.Module) -> bool:
    """Whether somebody else's hooks in a layer would see tokens in place of batches."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    for part in layer.modules():
        state = part.__dict__
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in state[name].values():
                if not (getattr(hook, "__module__", None) or "").startswith(_LOOK_AT_NO_BATCH):
                    return True
    return False
