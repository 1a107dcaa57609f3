"""What a packed stack of a Hugging Face model does around each of its layers: the hooks of `padding_free`.

Before a layer, its padded arguments become those of one sequence of N tokens, and its mask a `PackedRules`, which tells
the attention where sequences lie; after the last layer the tokens go back, zeros in place of padding. Each layer
decides for itself whether it runs packed, by its own arguments: which form its input has shows in the shape, so that
nothing is remembered between layers, a layer may be computed again, and one that cannot run packed unpacks first.

The hooks are functions of this module, so that models with them can be pickled and copied.

Letters: B batch, D model width, T queries, S keys, N tokens.
"""

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from fastformer.integrations.transformers import biases
from fastformer.integrations.transformers.arguments import (
    BY_TOKEN,
    argument,
    by_token,
    once,
    parameters,
    tensors,
    to_batch,
    to_tokens,
)
from fastformer.integrations.transformers.caches import Shared, holds_memory, takes, unpacking
from fastformer.integrations.transformers.given_masks import new_pass, padding_rules
from fastformer.integrations.transformers.masks import MaskRules, PackedRules, packed_rules
from fastformer.integrations.transformers.parts import is_known_hook, looks_at_no_batch, sees_batches
from fastformer.modes import current_node, has_values, recorded
from fastformer.packing import Layout

MASK, STATES, STATES_MASK = "attention_mask", "encoder_hidden_states", "encoder_attention_mask"
CACHES = ("past_key_values", "layer_past")  # one of them
BIAS, CROSS_BIAS = "position_bias", "encoder_decoder_position_bias"
SHARED = "shared_kv_states"  # keys and values of a layer that later layers attend to, by its kind (Gemma)
# What a layer may be given beside these: no numbers of tokens, or none that a layer computes with.
OTHERS = {
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "cache_position",
    "return_dict",
    "num_items_in_batch",
    "labels",
    "logits_to_keep",
}
KNOWN = {MASK, STATES, STATES_MASK, *CACHES, BIAS, CROSS_BIAS, SHARED, *BY_TOKEN, *OTHERS}
_CALL = nn.Module._call_impl.__code__  # in whose frame `self` is the module that is called


def begin(owner: nn.Module, *_: Any) -> None:
    """Forward pre-hook of a stack's owner."""
    if not recorded():
        new_pass()


def _in_a_pass() -> bool:
    """Whether the forward of a packed stack's owner runs in this thread, or layers are computed again.

    A mask of theirs says so by what it is, one `[B, 1, 1, S]` does not: somebody may call a layer with it, alone. The
    stack of calls is asked, since nothing remembered of a call would survive Ctrl-C within it.
    """
    if current_node() is not None:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and begin in frame.f_locals["self"]._forward_pre_hooks.values():
            return True
        frame = frame.f_back
    return False


def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of every layer."""
    if recorded():
        return None
    names = parameters(layer)
    given = dict(zip(names, args, strict=False)) | kwargs
    rules, x = given.get(MASK), given.get(names[0])
    if len(args) > len(names) or not isinstance(x, Tensor) or x.dim() < 3:
        return None
    if isinstance(rules, Tensor) and rules.dim() == 4 and _in_a_pass():
        rules = padding_rules(rules, packed=x.shape[-3:-1] != (*rules.shape[:1], *rules.shape[-1:]))
    if type(rules) is not MaskRules or rules.key_mask is None or rules.layout is not None:
        return None
    if not has_values(rules.key_mask):
        return None
    layout = rules.real_keys(x.device)
    if layout.total == rules.shape[0] == 1:  # the first step with a static cache has such a mask, and the same shape
        return None
    padded = x.shape[-3:-1] == (rules.shape[0], rules.shape[2])
    if not padded:
        if x.shape[-3:-1] != (1, layout.total):
            return None
        _check_first(layer)
    packs = has_values(x) and _may_pack(layer, names[0], given, rules, layout)
    if packs:
        changed = _packed(layer, names[0], given, rules, layout, padded)
    else:
        changed = {} if padded else _unpacked(names[0], given, layout)
    if given.get(SHARED) is not None:
        changed[SHARED] = Shared(given[SHARED], rules, layout, packed=packs)
    if not changed:
        return None
    given.update(changed)
    values = list(given.values())
    return tuple(values[: len(args)]), {name: given[name] for name in list(given)[len(args) :]}


def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the last layer: put the tokens back."""
    rules = packed_rules(args, kwargs)
    if rules is None:
        return None
    if isinstance(output, Tensor):
        return to_batch(output, rules.layout)
    return (to_batch(output[0], rules.layout), *output[1:])


def packs(layer: nn.Module) -> bool:
    """Whether a layer has the hook that packs."""
    return enter in layer._forward_pre_hooks.values()


def check_left(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a stack's owner: raise where tokens were not put back, because the last layer did not run.

    Also where somebody has put modules around layers since, which saw tokens in place of batches.
    """
    for stack in owner.children():
        for index, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
            around = not packs(layer) and not looks_at_no_batch(type(layer)) and any(map(packs, layer.modules()))
            if around:
                raise RuntimeError(
                    f"layer {index} of {type(owner).__name__} is a {type(layer).__name__} around one that runs packed; "
                    "fastformer.integrations.transformers.padding_free(model) again"
                )
    if recorded():
        return
    names = parameters(owner)
    by_name = dict(zip(names, args, strict=False)) | kwargs
    inputs = (by_name.get(name) for name in ("inputs_embeds", "input_ids", "hidden_states", *names[:1]))
    given = next((x for x in inputs if isinstance(x, Tensor) and x.dim() > 1), None)
    found = output[0] if isinstance(output, tuple | OrderedDict) and len(output) else output
    if given is None or not isinstance(found, Tensor) or found.dim() != 3 or found.shape[0] > 1:
        return
    of_one = given.shape[0] == 1 and found.shape[1] < given.shape[1]
    if given.shape[0] > 1 or (of_one and found.shape[1] == _real(by_name.get(MASK))):
        raise RuntimeError(
            f"the last layer of {type(owner).__name__} did not run, so its tokens are still packed; "
            "fastformer.integrations.transformers.padded(model) before layers are left out"
        )


def _real(mask: Any) -> int | None:
    """How many tokens of a stack's input are real, by its mask."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = padding_rules(mask)
    real = mask.key_mask if isinstance(mask, MaskRules) else mask
    return int((real != 0).sum()) if isinstance(real, Tensor) and has_values(real) else None


def _check_first(layer: nn.Module) -> None:
    """Raise where somebody's hook was called before `enter`, and so with tokens in place of a batch."""
    for hook in layer._forward_pre_hooks.values():
        if hook is enter:
            return
        if not is_known_hook(hook):
            raise RuntimeError(
                f"a hook was put before all others of a {type(layer).__name__} that runs packed; "
                "fastformer.integrations.transformers.padding_free(model) again"
            )


def _may_pack(layer: nn.Module, first: str, given: dict[str, Any], rules: MaskRules, layout: Layout) -> bool:
    """Whether one call of a layer can run packed."""
    B, _, T, S = rules.shape
    if T != S or rules.used != S or layout.total == B * S or layout.total == 0:
        return False  # a cache that holds something, or no padding
    if rules.mask is not None:
        return False
    if _active_collector.get() or given.get("output_attentions") or sees_batches(layer):
        return False
    if not all(takes(given.get(name)) and not holds_memory(given.get(name), layer) for name in CACHES):
        return False
    for name, value in given.items():
        if name in BY_TOKEN:
            if not by_token(name, value, B, S):
                return False
        elif name not in KNOWN and name != first and any(True for _ in tensors(value)):
            return False
    bias, states, states_mask = given.get(BIAS), given.get(STATES), given.get(STATES_MASK)
    if bias is not None and bias.dim() != 2:
        return False  # made by a layer that ran padded
    if layout.has_gaps and (rules.window is not None or counts_positions(layer)):
        return False
    if states is None:
        return True
    if states_mask is None:
        return bool(states.dim() == 3 and states.shape[0] == B)
    over_pairs = not isinstance(states_mask, MaskRules) or states_mask.mask is not None or states_mask.causal
    if over_pairs or not states_mask.used == states_mask.shape[3] == states.shape[1] or states.shape[0] != B:
        return False
    real = states_mask.key_mask
    return real is None or (has_values(real) and states_mask.real_keys(states.device).total > 0)


def _packed(
    layer: nn.Module, first: str, given: dict[str, Any], rules: MaskRules, layout: Layout, padded: bool
) -> dict[str, Any]:
    """The arguments of a layer that are others where it runs packed."""
    changed: dict[str, Any] = {}
    if padded:
        changed[first] = to_tokens(given[first], layout)
    for name in BY_TOKEN.keys() & given.keys():
        changed[name] = argument(name, given[name], layout, rules)
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
        changed[BIAS] = biases.of_layer(layer, layout, given[first])
    if CROSS_BIAS in parameters(layer) and given.get(CROSS_BIAS) is None:
        changed[CROSS_BIAS] = given[first].new_zeros(1)  # T5 would make zeros of all pairs
    return changed


def _unpacked(first: str, given: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The same of a layer that cannot run packed, after one that did.

    In place of padding stands a token: of zeros some layers have no gradient (Gemma 3n's standard deviations).
    """
    x = given[first]
    real, token = layout.mask()[..., None], x[..., :1, :].detach()
    changed: dict[str, Any] = {first: torch.where(real, to_batch(x, layout), token)}
    bias = given.get(BIAS)
    if bias is not None and bias.dim() == 2:
        changed[BIAS] = biases.of_all_pairs(bias, layout.columns)
    return changed


def _states(layer: Any, states: Tensor, layout: Layout, rules: MaskRules) -> Tensor:
    """Pack the encoder's states, once for all layers where none of them is computed again."""
    if getattr(layer, "gradient_checkpointing", False) and layer.training and states.requires_grad:
        return to_tokens(states, layout)
    return once(states, layout, rules)


def counts_positions(layer: nn.Module) -> bool:
    """Whether a layer's attention has a relative bias."""
    return BIAS in parameters(layer) or any(biases.makes_biases(part) for part in layer.modules())
