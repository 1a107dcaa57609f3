"""`attn_implementation="fastformer"`: the attention of one layer, its name in transformers, and T5's bias.

Letters: B batch, H heads, T queries, S keys, K head size, Kv that of values, P positions, N tokens of a packed batch.
"""

import inspect
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from fastformer import functional
from fastformer.integrations.transformers.eligibility import calls_the_interface
from fastformer.integrations.transformers.entry import NotPacked, forward, install, packed
from fastformer.integrations.transformers.masks import MaskRules, mask_rules
from fastformer.modes import compiling

NAME = "fastformer"

# Keywords that pass through layers on their way elsewhere; no attention of transformers reads them.
_NOT_FOR_ATTENTION = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "labels", "logits_to_keep", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


def _rules_of(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, is_causal: bool | None, sliding_window: int | None
) -> MaskRules:
    """Return the rules of one layer's call: those of `mask_rules`, or of a mask that a model or user made."""
    T, S = query.shape[2], key.shape[2]
    if packed() is not None and (not isinstance(mask, MaskRules) or mask.layout is None):
        raise NotPacked("a mask is its own, or one of all pairs, or counts padding between tokens")
    if isinstance(mask, MaskRules):
        if mask.layout is not None:
            return mask  # the op compares the layouts with what it is given
        by_position = mask.causal or mask.window is not None or mask.mask is not None
        if mask.shape[3] != S or (by_position and mask.shape[2] != T):
            raise ValueError(
                f"attention_mask is for {mask.shape[2]} queries and {mask.shape[3]} keys, not for {T} and {S}"
            )
        stated = is_causal is False and mask.causal and getattr(module, "is_causal", True)
        if stated and not _has_its_own_hint(module):
            raise ValueError(
                "is_causal=False contradicts the causal mask of the model; set config.is_causal = False instead"
            )
        return mask
    shape = (key.shape[0], 1, T, S)
    if mask is None:
        causal = T > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and T != S:
            raise ValueError(f"attention_mask is None: {T} causal queries have no known place among {S} keys")
        if sliding_window is not None and sliding_window < S:
            raise ValueError(f"attention_mask is None, and does not hold the sliding window of {sliding_window}")
        return MaskRules(shape, S, causal=causal)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        kind = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be a tensor [B, H, T, S], not {kind}")
    if mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        return MaskRules(shape, S, mask[:, 0, 0].expand(key.shape[0], -1))
    return MaskRules(shape, S, mask=mask)


def _has_its_own_hint(module: nn.Module) -> bool:
    """Whether a layer's own forward says `is_causal`: Moonshine's says False where it has a mask, which counts then."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "is_causal" in code.co_varnames


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Merge a mask and the position bias of T5, which is added to the scores."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask


def _wants_weights(asked: object, rules: MaskRules) -> bool:
    """Whether the attention weights of this call are wanted: asked for here, or collected by a model's hooks."""
    if asked:
        return True
    if compiling() and not _active_collector.compiling:
        return False  # the context variable behind it cannot be traced
    collected = _active_collector.get()
    if collected is None:  # no model's call: perhaps a layer that is computed again
        return "weights" in rules.notes
    wanted = any(key.endswith("attentions") for key in collected)
    if wanted and not compiling():
        rules.notes.add("weights")
    return wanted


def _check(kwargs: dict[str, Any], rules: MaskRules) -> None:
    """Raise for keywords that the op has no words for."""
    unknown = [name for name, value in kwargs.items() if value is not None and value is not False]
    unknown = [name for name in unknown if name not in _NOT_FOR_ATTENTION]
    if unknown:
        raise ValueError(
            f"fastformer's attention does not know {', '.join(unknown)}, which may change the result; "
            'use attn_implementation="eager" for this model or call'
        )
    offsets: Sequence[Any] | Tensor | None = kwargs.get("cu_seq_lens_q")
    if offsets is not None and len(offsets) > 2 and rules.mask is None and rules.layout is None:
        raise ValueError(
            "cu_seq_lens_q has several sequences a row, but attention_mask does not keep them apart: "
            "pass position_ids that start again at 0 for each, and no attention_mask"
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRules | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer; registered with transformers' AttentionInterface.

    Args:
        module: the layer.
        query, key, value: `[B, H, T, K]`, `[B, Hkv, S, K]`, `[B, Hkv, S, Kv]`; packed, B is 1; H is a multiple of Hkv.
        attention_mask: from `mask_rules`; or a tensor `[B, H, T, S]`, bool (True = may attend) or additive; or None.
        dropout: of the attention weights, in training.
        scaling: K ** -0.5 if None.
        is_causal: counts where there is no mask; `module.is_causal` if None.
        position_bias: added to the scores, broadcastable to `[B, H, T, S]` (T5); packed, by distance, `[H, 2 P - 1]`.
        softcap, s_aux: as softcap and sinks in `functional.attention`.
        sliding_window: stands in the mask already.
        **kwargs: what passes through the layers.

    Returns:
        `[B, T, H, Kv]`, packed `[1, N, H, Kv]`, and the weights `[B, H, T, S]` where they are asked for, else None.

    Raises:
        ValueError: something that would change the result cannot be said to `functional.attention`.
    """
    rules = _rules_of(module, query, key, attention_mask, is_causal, sliding_window)
    _check(kwargs, rules)
    weights_too = _wants_weights(kwargs.get("output_attentions"), rules)
    settings: dict[str, Any] = {
        "causal": rules.causal,
        "alignment": "bottom_right",
        "window": rules.window,
        "softcap": softcap,
        "dropout_p": dropout if module.training else 0.0,
        "scale": scaling,
        "sinks": s_aux,
    }
    if rules.layout is not None:
        by_distance = position_bias is None or position_bias.dim() < 3
        if by_distance and not weights_too:
            return _in_runs(query, key, value, rules, settings, position_bias), None
        raise (ValueError if packed() is None else NotPacked)(
            "attention weights, or a bias of all pairs, in a packed call"
        )
    S = key.shape[2]
    if query.shape[0] == 1:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    mask = _with_bias(rules.mask, position_bias)
    if rules.used < S:
        key, value = key[:, :, : rules.used], value[:, :, : rules.used]
        mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., : rules.used]
    settings["key_mask"] = rules.key_mask if rules.mask is None else None  # which says it too
    if not weights_too:
        return functional.attention(query, key, value, mask, **settings).transpose(1, 2).contiguous(), None
    out, weights = functional.attention_with_weights(query, key, value, mask, **settings)
    return out.transpose(1, 2).contiguous(), F.pad(weights, (0, S - rules.used))


def _in_runs(
    query: Tensor, key: Tensor, value: Tensor, rules: MaskRules, settings: dict[str, Any], bias: Tensor | None
) -> Tensor:
    """Attend within the sequences of a run of tokens, which may fill several rows: `[B, T, H, Kv]`."""
    assert rules.layout is not None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [N, H, K]
    bias = None if bias is None or bias.numel() == 1 else bias
    out = functional.packed_attention(q, k, v, rules.layout, rules.key_layout, distance_bias=bias, **settings)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])


def bias_by_distance(part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Forward pre-hook of T5's attention: make its bias by distance, not of all pairs, where tokens are packed.

    By its own function, for one query: `[H, 2 P - 1]`. The attention to an encoder has a bias of zeros.
    """
    rules = kwargs.get("mask")
    if not isinstance(rules, MaskRules) or rules.layout is None or kwargs.get("position_bias") is not None:
        return None
    if not part.has_relative_attention_bias:
        return args, {**kwargs, "position_bias": args[0].new_zeros(1)}
    if rules.layout.has_gaps:
        raise NotPacked("padding between tokens, which a bias counts")
    P = max(rules.layout.max_length, 1)
    bias = part.compute_bias(1, 2 * P - 1, device=args[0].device, past_seen_tokens=P - 1)
    return args, {**kwargs, "position_bias": bias[0, :, 0]}


def register() -> None:
    """Make `attn_implementation="fastformer"` known to transformers; done on import, and harmless to repeat.

    transformers gives any model any name that is registered. Where a model computes attention by itself, such as
    DeBERTa, the name would change nothing: `PreTrainedModel.get_correct_attn_implementation` raises for it then.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_rules)
    original = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "asks_fastformer", False):
        return

    @wraps(original)
    def correct(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME and not calls_the_interface(self):
            raise ValueError(
                f'attn_implementation="{NAME}" does not reach the attention of {type(self).__name__}, which computes '
                'it by itself, outside of transformers\' attention interface; use "eager" or "sdpa" for it'
            )
        if requested_attention == NAME:
            for model in self.modules():  # parts that share its configuration are not asked
                if isinstance(model, PreTrainedModel):
                    install(model, forward)
        return original(self, requested_attention, *args, **kwargs)  # type: ignore[no-any-return]

    correct.asks_fastformer = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct
