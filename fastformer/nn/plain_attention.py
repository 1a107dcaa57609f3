"""Attention that is torch's ops on a CPU and nothing else: asked once, then called without a question between them.

After products of large weights, what Python asks finds nothing in the caches, and is two to three times as dear as
alone: a decoder layer of a few tokens took a twentieth more than torch's for it. Everything unusual goes the way of
`MultiheadAttention.forward`, whose ops these are, in its order.

Letters: B batch, H heads, T queries, S keys, D model width, K head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.functional.attention.reference import (
    attention_of_all,
    attention_of_all_with_weights,
    attention_over_zeros,
)
from fastformer.functional.attention.rules import AttentionRules
from fastformer.functional.checks import check_probability
from fastformer.functional.choice import is_torchs
from fastformer.host.devices import autocasts
from fastformer.modes import watched
from fastformer.nn.hooks import has_own_hooks
from fastformer.nn.projections import OUT_PROJECTIONS

_FEW = 256  # tokens; of more, products take what there is to gain, and all scores more memory than theirs
# What a module has that is torch's; options of ours, and methods put in the place of its class's.
_PARAMETERS = {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_CHANGES = {"_kv_heads", "window", "softcap", "rotary", "position_bias", "sinks", "q_norm", "k_norm"}
_CHANGES |= {"rules", "project_out"}

# Of both projections: weight, bias, weight, bias.
Weights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def plain_weights(attention: Any, x: Tensor) -> Weights | None:
    """The parameters of a `MultiheadAttention`, where x meets torch's ops alone, which nobody watches; else None."""
    if watched():  # asked first: Dynamo of torch 2.11 cannot compare what follows
        return None
    state = attention.__dict__
    own, parts = state["_parameters"], state["_modules"]
    if not (own.keys() <= _PARAMETERS and _CHANGES.isdisjoint(state)) or len(parts) != 1 or state["_buffers"]:
        return None
    if state.get("bias_k") is not None or state["add_zero_attn"]:
        return None
    out_proj = parts.get("out_proj")
    if type(out_proj) not in OUT_PROJECTIONS or has_own_hooks(out_proj):
        return None
    out = out_proj._parameters
    if "in_proj_bias" not in own or "bias" not in out:  # but in a buffer or an attribute
        return None
    weights = own.get("in_proj_weight"), out.get("weight")
    biases = own["in_proj_bias"], out["bias"]
    # Somebody's own parameter may not be read by torch's ops, or not by its name.
    if not all(type(weight) is nn.Parameter for weight in weights):
        return None
    if not all(bias is None or type(bias) is nn.Parameter for bias in biases):
        return None
    if not all(is_torchs(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)):
        return None
    return None if autocasts(x) else (weights[0], biases[0], weights[1], biases[1])


def weights_of_few(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`plain_weights`, where attention of x to itself, without masks, is torch's one op; else None.

    It is that of a few tokens, in inference. For 14 tokens of width 512 that takes a twentieth less: its products leave
    the biases to what comes between. It keeps all scores, so not for many.
    """
    if attention.training or torch.is_grad_enabled() or not attention.batch_first or attention.num_heads % 2:
        return None
    if x.is_nested or x.dim() != 3 or not 0 < x.shape[0] * x.shape[1] <= _FEW:
        return None
    D, found = attention.embed_dim, plain_weights(attention, x)
    if found is None or attention.num_heads * attention.head_dim != D:
        return None
    weight, bias, out_weight, out_bias = found
    if bias is None or out_bias is None or x.shape[2] != D or bias.shape != (3 * D,) or out_weight.shape != (D, D):
        return None
    return weight, bias, out_weight, out_bias


def attend_plainly(
    attention: Any,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    need_weights: bool = False,
    average_attn_weights: bool = True,
) -> tuple[Tensor, Tensor | None] | None:
    """Attend from query to key, as key and value, with no mask but a causal one that is said to be it.

    Args:
        attention: a `MultiheadAttention`.
        query: `[B, T, D]` where it is `batch_first`, else `[T, B, D]`; key: likewise with S.
        attn_mask: as of `MultiheadAttention`, and all that follow.

    Returns:
        What `MultiheadAttention` does; None where it takes more than torch's ops, or something does not fit.
    """
    if type(key) is not Tensor or query.is_nested or key.is_nested or query.dim() != 3 or key.dim() != 3:
        return None
    if not key.is_cpu or key.dtype is not query.dtype:
        return None
    rows, time = (0, 1) if attention.batch_first else (1, 0)
    D, H, K = attention.embed_dim, attention.num_heads, attention.head_dim
    B, T, S = query.shape[rows], query.shape[time], key.shape[time]
    if not (query.shape[2] == key.shape[2] == D and key.shape[rows] == B and B and T and S):
        return None
    if need_weights and is_causal:
        return None
    if attn_mask is not None:
        said = is_causal and type(attn_mask) is Tensor and attn_mask.shape == (T, S)
        if not (said and (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())):
            return None
    found = plain_weights(attention, query)
    if found is None or found[0].shape != (3 * D, D) or H * K != D:
        return None
    weight, bias, out_weight, out_bias = found
    dropout_p = attention.dropout if attention.training else 0.0
    check_probability("dropout_p", dropout_p)

    def heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [B, heads, L, K]
        projected = F.linear(x, weight, bias)
        return projected.view(*x.shape[:2], -1, K).permute(rows, 2, time, 3)

    if key is query:
        q, k, v = heads(query, weight, bias).split_with_sizes([H, H, H], 1)
    else:
        parts = weight.split_with_sizes([D, 2 * D])
        biases = (None, None) if bias is None else bias.split_with_sizes([D, 2 * D])
        q = heads(query, parts[0], biases[0])
        k, v = heads(key, parts[1], biases[1]).split_with_sizes([H, H], 1)
    applied = None
    if need_weights:
        out, applied = attention_of_all_with_weights(q, k, v, dropout_p)
        applied = applied.mean(1) if average_attn_weights else applied
    elif dropout_p:
        out = attention_over_zeros(q, k, v, AttentionRules(causal=is_causal, dropout_p=dropout_p))
    else:
        out = attention_of_all(q, k, v, is_causal)
    out = out.permute((0, 2, 1, 3) if rows == 0 else (2, 0, 1, 3)).flatten(2)
    return F.linear(out, out_weight, out_bias), applied
