"""The specification of attention, in plain PyTorch: any device, any dtype.

As fast as PyTorch's own ops allow, and the place where edge cases are decided: a query that may attend to nothing gives
output 0 and gradient 0 (torch gives NaN in some paths); statistics and softmax accumulate as torch's own ops do for the
dtype; what lies in padding reaches nothing, be it NaN.

Letters: B batch, H heads, T queries, S keys, L positions, K head size.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.attention.distances import with_distances
from fastformer.functional.attention.formula import repeat_heads, scores_to_weights, weighted_sum, widens
from fastformer.functional.attention.rules import AttentionRules, allowed_positions, open_dead_rows
from fastformer.functional.dropout import drop
from fastformer.host.devices import product_dtype
from fastformer.modes import readable

_SMALLEST = torch.finfo(torch.float32).tiny


def only_causal(rules: AttentionRules) -> bool:
    """Return whether SDPA's `is_causal` says all about which keys a query attends to.

    On a CPU it multiplies its -inf with the scale, too: NaN where that is 0, in fp32, or negative.
    """
    others = (rules.window, *rules.tensors)
    if rules.scale is not None and not rules.scale > _SMALLEST:
        return False
    return rules.causal and rules.alignment == "top_left" and all(x is None for x in others)


def attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    Args:
        q: `[B, H, T, K]`.
        k: `[B, Hkv, S, K]`; v: `[B, Hkv, S, Kv]`. Hkv divides H.
        rules: from `check_attention`.

    Returns:
        `[B, H, T, Kv]`.
    """
    return attention_over_zeros(*blank_padding(q, k, v, rules), rules)


def attention_over_zeros(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """`attention`, where what lies in padding is known to be zero: nobody looks whether it is finite."""
    if k.shape[-2] == 0:  # nothing to attend to
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)  # zeros, with gradients
    # SDPA has no softcap and no sinks; on a CPU it has no fused path with dropout, and the weights' random bits are
    # cheaper here.
    drops = rules.dropout_p > 0.0 and q.device.type == "cpu"
    if drops or rules.softcap is not None or rules.sinks is not None:
        return _apply_weights(q, k, v, rules)[0]
    dropout_p, scale, causal = rules.dropout_p, rules.scale, only_causal(rules)
    merged, dead = open_dead_rows(with_distances(q, k, rules), None if causal else allowed_positions(q, k, rules))
    # A bias by distance stays fp32 where SDPA takes that beside 16 bits.
    if merged is not None and merged.is_floating_point() and not (widens(q) and merged.dtype == torch.float32):
        merged = merged.to(q.dtype)
    # A branch, since numbers of heads are symbols to a compiler that meets the model sharded.
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    out = F.scaled_dot_product_attention(q, k, v, merged, dropout_p, is_causal=causal, scale=scale, **grouped)
    return out if dead is None else out.masked_fill(dead, 0.0)


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied (after dropout, as torch returns them)."""
    return _apply_weights(*blank_padding(q, k, v, rules), rules)


def _apply_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    allowed = allowed_positions(q, k, rules)
    # Every query sees the first key where causality alone limits: none is dead.
    merged, dead = (allowed, None) if only_causal(rules) else open_dead_rows(with_distances(q, k, rules), allowed)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    weights = scores_to_weights(q, k, merged, rules.scale, rules.softcap, rules.sinks)
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    weights = drop(weights, rules.dropout_p)
    return weighted_sum(weights, v), weights.to(product_dtype(q)) if widens(q) else weights


def _harmless(dtype: torch.dtype) -> float:
    """Products of two such numbers, and of these with gradients and scales, are far from the largest number."""
    return float(torch.finfo(dtype).max ** 0.25)


def _blank(real: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return `[B, H, L, K]` with zeros where real `[B, L]` is False; the inputs themselves where these do no harm.

    A hidden score is its value and -inf: NaN where the value is inf, of NaN, inf, or numbers so large that their
    products are. A look costs 2 ms where two copies cost 22, and attention 16 (64 rows, 8 heads, 64 positions, K = 64,
    one core).
    """
    hidden = ~real
    if readable(hidden) and all(readable(x) for x in inputs):
        columns = hidden.any(0).nonzero()
        if not columns.numel():
            return inputs
        first = int(columns[0])
        if all(bool(torch.linalg.vector_norm(x.detach()[:, :, first:]) < _harmless(x.dtype)) for x in inputs):
            return inputs
    return tuple(x.masked_fill(hidden[:, None, :, None], 0.0) for x in inputs)


def blank_padding(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of an attention call without what query_lengths, key_lengths and key_mask call padding.

    So does a bool mask that is the same for all queries and heads. What other masks hide is no padding: it matters who
    asks, and NaN there spreads as in torch.
    """
    found = [] if rules.key_mask is None else [rules.key_mask]
    if rules.key_lengths is not None:
        found.append(torch.arange(k.shape[2], device=k.device) < rules.key_lengths[:, None])
    if rules.mask is not None and rules.mask.dtype == torch.bool:
        shape = (1, 1, *rules.mask.shape)[-4:]
        if shape[1] == shape[2] == 1:
            found.append(rules.mask.reshape(shape[0], shape[3]).expand(k.shape[0], k.shape[2]))
    if found:
        k, v = _blank(reduce(torch.logical_and, found), k, v)
    if rules.query_lengths is not None:
        (q,) = _blank(torch.arange(q.shape[2], device=q.device) < rules.query_lengths[:, None], q)
    return q, k, v
