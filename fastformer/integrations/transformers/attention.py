"""`attn_implementation="fastformer"`: the attention of one layer, its name in transformers, biases of T5 and MPNet.

Letters: B batch, H heads, T queries, S keys, K head size, Kv that of values, P positions, N tokens of a packed batch.
"""

import math
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fastformer import functional
from fastformer.integrations.transformers.eligibility import calls_the_interface
from fastformer.integrations.transformers.entry import NAME, NotPacked, Packed, forward, install, running
from fastformer.integrations.transformers.masks import MaskRules, collects_weights, mask_rules

# Keywords that pass through layers on their way elsewhere; no attention of transformers reads them.
_NOT_FOR_ATTENTION = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "labels", "logits_to_keep", "max_length_k",
    "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


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
    """Attend in one layer; registered with transformers' AttentionInterface, which documents the arguments.

    attention_mask is of `mask_rules`, a tensor `[B, H, T, S]` or None; is_causal counts where it is None, as in `sdpa`.
    position_bias is broadcastable to `[B, H, T, S]` (T5), or by distance `[H, 2 P - 1]` in a packed call.

    Returns:
        `[B, T, H, Kv]`, and the weights `[B, H, T, S]` where they are asked for, else None. Packed, B is 1.

    Raises:
        ValueError: `functional.attention` has no argument for something that would change the result.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rules = _rules_of(query, key, attention_mask, bool(causal), sliding_window)
    unknown = [
        name for name, x in kwargs.items() if name not in _NOT_FOR_ATTENTION and x is not None and x is not False
    ]
    if unknown:
        raise ValueError(
            f"fastformer's attention does not know {', '.join(unknown)}, which may change the result; "
            'use attn_implementation="eager" for this model or call'
        )
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is not None and len(offsets) > 2 and rules.mask is None and rules.layout is None:
        raise ValueError(
            "cu_seq_lens_q has several sequences a row, but attention_mask does not keep them apart: "
            "pass position_ids that start again at 0 for each, and no attention_mask"
        )
    weights_too = kwargs.get("output_attentions") or rules.collected or collects_weights()
    settings: dict[str, Any] = {
        "causal": rules.causal, "alignment": "bottom_right", "window": rules.window, "softcap": softcap,
        "dropout_p": dropout if module.training else 0.0, "scale": scaling, "sinks": s_aux,
    }  # fmt: skip
    if rules.layout is not None:
        if weights_too or (position_bias is not None and position_bias.dim() > 2):
            raise NotPacked("attention weights, or a bias of all pairs, in a packed call")
        bias = None if position_bias is None or position_bias.numel() == 1 else position_bias
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [N, H, K]
        out = functional.packed_attention(q, k, v, rules.layout, rules.key_layout, distance_bias=bias, **settings)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
    S = key.shape[2]
    if query.shape[0] == 1:  # learned queries, the same for the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    mask = position_bias if rules.mask is None else rules.mask
    if rules.mask is not None and position_bias is not None:
        by_pair = rules.mask.dtype == torch.bool
        mask = torch.where(rules.mask, position_bias, float("-inf")) if by_pair else position_bias + rules.mask
    if rules.used < S:
        key, value = key[:, :, : rules.used], value[:, :, : rules.used]
        mask = None if mask is None else mask[..., : rules.used]
    settings["key_mask"] = rules.key_mask
    if not weights_too:
        return functional.attention(query, key, value, mask, **settings).transpose(1, 2).contiguous(), None
    out, weights = functional.attention_with_weights(query, key, value, mask, **settings)
    return out.transpose(1, 2).contiguous(), F.pad(weights, (0, S - rules.used))


def _rules_of(query: Tensor, key: Tensor, mask: Any, causal: bool, sliding_window: int | None) -> MaskRules:
    """Return the rules of one layer's call: those of `mask_rules`, or of a mask that a model or user made."""
    T, S = query.shape[2], key.shape[2]
    if isinstance(running(), Packed) and (not isinstance(mask, MaskRules) or mask.layout is None):
        raise NotPacked("a mask is its own, or one of all pairs, or counts padding between tokens")
    if isinstance(mask, MaskRules):
        by_position = mask.causal or mask.window is not None or mask.mask is not None
        if mask.layout is None and (mask.shape[3] != S or (by_position and mask.shape[2] != T)):
            raise ValueError(
                f"attention_mask is for {mask.shape[2]} queries and {mask.shape[3]} keys, not for {T} and {S}"
            )
        return mask  # the op compares a layout with what it is given
    if mask is None:
        causal = T > 1 and causal
        if causal and T != S:
            raise ValueError(f"attention_mask is None: {T} causal queries have no known place among {S} keys")
        if sliding_window is not None and sliding_window < S:
            raise ValueError(f"attention_mask is None, and does not hold the sliding window of {sliding_window}")
        return MaskRules((len(key), 1, T, S), S, causal=causal)
    return MaskRules((len(key), 1, T, S), S, mask=mask)


def bias_by_distance(attention: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run T5's attention with a bias by distance `[H, 2 P - 1]` in place of all pairs, where tokens are packed.

    The bias is computed by T5's own function, for one query. The attention to an encoder has a bias of zeros.
    """
    rules, given = kwargs.get("mask"), kwargs.get("position_bias")
    if isinstance(rules, MaskRules) and rules.layout is not None and given is None:
        if not attention.has_relative_attention_bias:
            kwargs["position_bias"] = args[0].new_zeros(1)
        elif rules.layout.has_gaps:
            raise NotPacked("padding between tokens, which a bias counts")
        else:
            P = max(rules.layout.max_length, 1)
            bias = attention.compute_bias(1, 2 * P - 1, device=args[0].device, past_seen_tokens=P - 1)
            kwargs["position_bias"] = bias[0, :, 0]
    return inner(*args, **kwargs)


def mpnet_bias(encoder: Any, inner: Any, names: tuple[str, ...], /, x: Tensor, **kwargs: Any) -> Any:
    """Return MPNet's bias by distance `[H, 2 P - 1]` and the layout of the tokens, in place of all pairs, if packed.

    It wraps `MPNetEncoder.compute_position_bias`. The encoder passes the result to the attention of each layer.
    """
    batch = running()
    if not isinstance(batch, Packed):
        bias = inner(x, **kwargs)
        return bias if batch is None else bias.masked_fill(batch[:, None, :, None] != batch[:, None, None], -math.inf)
    if batch.sequences.has_gaps:
        raise NotPacked("padding between tokens, which a bias counts")
    P = batch.sequences.max_length
    buckets = encoder.relative_position_bucket(torch.arange(1 - P, P, device=x.device), **kwargs)
    return encoder.relative_attention_bias(buckets).T, batch.sequences


def mpnet_attention(attention: Any, inner: Any, names: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Run MPNet's attention, which does not call transformers' interface, on packed tokens after `mpnet_bias`."""
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x, bias = arguments["hidden_states"], arguments.get("position_bias")
    if not isinstance(bias, tuple):
        return inner(*args, **kwargs)
    distance_bias, layout = bias
    q, k, v = (
        linear(x).view(x.shape[1], attention.num_attention_heads, -1)  # [N, H, K]
        for linear in (attention.q, attention.k, attention.v)
    )
    dropout_p = attention.dropout.p if attention.training else 0.0
    out = functional.packed_attention(q, k, v, layout, distance_bias=distance_bias, dropout_p=dropout_p)
    return (attention.o(out.flatten(1)[None]),)


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
        if requested_attention == NAME:
            if not calls_the_interface(self):
                raise ValueError(
                    f'attn_implementation="{NAME}" does not reach the attention of {type(self).__name__}, which '
                    'computes it by itself, outside of transformers\' attention interface; use "eager" or "sdpa" for it'
                )
            for model in self.modules():  # parts that share its configuration are not asked
                if isinstance(model, PreTrainedModel):
                    install(model, forward)
        return original(self, requested_attention, *args, **kwargs)  # type: ignore[no-any-return]

    correct.asks_fastformer = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct
