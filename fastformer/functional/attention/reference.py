"""The specification of attention, in plain PyTorch: any device, any dtype.

As fast as PyTorch's own ops allow. Edge cases are decided here. A query that may attend to nothing gives output 0 and
gradient 0 (torch gives NaN in some paths). Softmax accumulates as torch's own op does for the dtype. No value in
padding reaches a result, NaN included.

Letters: B batch, H heads, T queries, S keys, L positions, K head size.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.attention.rules import (
    AttentionRules,
    allowed_positions,
    as_key_mask,
    open_dead_rows,
    with_distances,
)
from fastformer.functional.attention.spans import Span, visible_spans
from fastformer.functional.dropout import drop
from fastformer.host.devices import autocasts, product_dtype
from fastformer.modes import compiling, dispatch_modes, needs_dispatcher, readable

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_SMALLEST = torch.finfo(torch.float32).tiny


def only_causal(rules: AttentionRules) -> bool:
    """Return whether SDPA's `is_causal` alone states which keys a query attends to.

    On a CPU SDPA multiplies its -inf with the scale, too: NaN if the scale is negative, or 0 in fp32.
    """
    limits = (rules.window, *rules.tensors)
    if rules.scale is not None and not rules.scale > _SMALLEST:
        return False
    return rules.causal and rules.alignment == "top_left" and all(x is None for x in limits)


def attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """Compute `functional.attention` with rules from `check_attention`."""
    spans = visible_spans(q, k, rules)
    if spans is not None:  # the spans leave out all padding except the mask's
        q, k, v = blank_padding(q, k, v, replace(rules, query_lengths=None, key_lengths=None, key_mask=None))
        return attend_in_spans(q, k, v, rules, spans)
    return _without_padding(attention_over_zeros, q, k, v, rules)  # type: ignore[no-any-return]


def _without_padding(compute: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Any:
    """Return compute(q, k, v, rules), an output or several, such that no value in padding changes it.

    In inference on a CPU, only the output is checked, which takes less time than k and v: if a hidden value is NaN or
    overflows, its weight of 0 times the value is NaN in the output. Then padding is zeroed and the call repeated. In
    training NaN can arise in the gradients alone, and with dropout a second call would draw other numbers.
    """
    hiding = rules.mask, rules.query_lengths, rules.key_lengths, rules.key_mask
    hides = any(x is not None for x in hiding)
    if hides and not torch.is_grad_enabled() and rules.dropout_p == 0.0 and readable(q):
        outputs = compute(q, k, v, rules)
        out = outputs if isinstance(outputs, Tensor) else outputs[0]
        if is_finite(out):
            return outputs
    return compute(*blank_padding(q, k, v, rules), rules)


def is_finite(x: Tensor) -> bool:
    """Return whether the numbers of x are finite, and so is their sum."""
    return math.isfinite(x.sum(dtype=torch.float32).item())


def attention_over_zeros(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """Compute `attention` without checking values in padding, where NaN would spread."""
    if k.shape[-2] == 0:  # nothing to attend to
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)  # zeros, with gradients
    # SDPA has no softcap and no sinks; on a CPU it has no fused path with dropout, and the weights' random bits are
    # cheaper here.
    drops = rules.dropout_p > 0.0 and q.device.type == "cpu"
    if drops or rules.softcap is not None or rules.sinks is not None or _trains_mask_alone(q, k, v, rules):
        return _apply_weights(q, k, v, rules)[0]
    dropout_p, scale, causal = rules.dropout_p, rules.scale, only_causal(rules)
    merged, dead = open_dead_rows(with_distances(q, k, rules), None if causal else allowed_positions(q, k, rules))
    # A bias by distance stays fp32 where SDPA takes an fp32 mask with 16-bit queries.
    if merged is not None and merged.is_floating_point() and not (widens(q) and merged.dtype == torch.float32):
        merged = merged.to(q.dtype)
    if merged is not None and merged.shape[-1] != k.shape[2]:  # SDPA on a GPU reads no mask of stride 0 over the keys
        merged = merged.expand(*merged.shape[:-1], k.shape[2]).contiguous()
    # A branch, because numbers of heads are symbols to torch.compile in a sharded model.
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    out = F.scaled_dot_product_attention(q, k, v, merged, dropout_p, is_causal=causal, scale=scale, **grouped)
    return out if dead is None else out.masked_fill(dead, 0.0)


def attend_in_spans(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, spans: list[Span]) -> Tensor:
    """Compute `attention` of the visible queries and keys of each row, in one call if they are the same in all rows."""
    (B, H, T, _), (S, Kv) = q.shape, v.shape[2:]
    rows = B if len(set(spans)) == 1 else 1  # of one call
    masks = None
    if rules.mask is not None:
        mask = rules.mask[(None,) * (4 - rules.mask.dim())]
        masks = torch.split(mask.expand(B, mask.shape[1], T, S), rows)
    parts: list[Tensor] = []
    for row, (q_rows, k_rows, v_rows) in enumerate(zip(*(torch.split(x, rows) for x in (q, k, v)), strict=True)):
        first, end, first_key, end_key = spans[row]
        of_span = replace(
            rules,
            mask=None if masks is None else masks[row][:, :, first:end, first_key:end_key],
            alignment="top_left" if end - first == end_key - first_key else rules.alignment,
            query_lengths=None,
            key_lengths=None,
            key_mask=None,
        )
        keys = slice(first_key, end_key)
        out = attention_over_zeros(q_rows[:, :, first:end], k_rows[:, :, keys], v_rows[:, :, keys], of_span)
        before, after = (out.new_zeros(rows, length, H, Kv) for length in (first, T - end))
        parts += before, out.transpose(1, 2), after
    return torch.cat(parts, 1).view(B, T, H, Kv).transpose(1, 2)


def _trains_mask_alone(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> bool:
    """Return whether only the mask or the bias needs a gradient, for which SDPA's backward fails on a GPU (2.11)."""
    if not torch.is_grad_enabled() or q.requires_grad or k.requires_grad or v.requires_grad:
        return False
    return any(x is not None and x.requires_grad for x in (rules.mask, rules.distance_bias))


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    """Compute `attention` and the weights `[B, H, T, S]` that it applied (after dropout, as torch returns them)."""
    return _without_padding(_apply_weights, q, k, v, rules)  # type: ignore[no-any-return]


def _apply_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    allowed = allowed_positions(q, k, rules)
    # With causality alone, every query sees the first key: none is dead.
    merged, dead = (allowed, None) if only_causal(rules) else open_dead_rows(with_distances(q, k, rules), allowed)
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    weights = scores_to_weights(q, k, merged, rules.scale, rules.softcap, rules.sinks)
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    weights = drop(weights, rules.dropout_p)
    return weighted_sum(weights, v), weights.to(product_dtype(q)) if widens(q) else weights


def are_harmless(*inputs: Tensor) -> bool:
    """Return whether all numbers are finite, and so small that no product of scores, weights or gradients overflows."""
    harmless = torch.finfo(inputs[0].dtype).max ** 0.25  # gradients and scales are factors of products, too
    rows = (torch.linalg.vector_norm(x.detach(), dim=-1) for x in inputs)  # slow over all dimensions
    return all(float(norms.amax()) < harmless for norms in rows)


def _blank(real: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Set `[B, H, L, K]` to zero where real `[B, L]` is False; return the inputs if their padding is harmless.

    A hidden score is q k^T plus -inf: NaN if q k^T is inf or NaN, from NaN, inf, or numbers whose products overflow.
    The check costs 2 ms where two copies cost 22, and attention 16 (64 rows, 8 heads, 64 positions, K = 64, one core).
    """
    if readable(real) and all(readable(x) for x in inputs):
        columns = real.all(0).tolist()
        if all(columns):
            return inputs
        first = columns.index(False)
        if are_harmless(*(x[:, :, first:] for x in inputs)):
            return inputs
    return tuple(x.masked_fill(~real[:, None, :, None], 0.0) for x in inputs)


def blank_padding(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of an attention call with zeros in place of padding.

    query_lengths, key_lengths, key_mask, and a bool mask that is the same for all queries and heads state padding. Keys
    that other masks hide are no padding: other queries may see them, and NaN there spreads as in torch.
    """
    real_keys = [] if rules.key_mask is None else [rules.key_mask]
    if rules.key_lengths is not None:
        real_keys.append(torch.arange(k.shape[2], device=k.device) < rules.key_lengths[:, None])
    if (keys := as_key_mask(rules.mask, k.shape[0], k.shape[2])) is not None:
        real_keys.append(keys)
    if real_keys:
        k, v = _blank(reduce(torch.logical_and, real_keys), k, v)
    if rules.query_lengths is not None:
        (q,) = _blank(torch.arange(q.shape[2], device=q.device) < rules.query_lengths[:, None], q)
    return q, k, v


def scores_to_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(cap(scale * q k^T) + mask), cap(x) = softcap * tanh(x / softcap): `[B, H, T, S]`.

    A sink is one more score in each row of its head; its weight is not returned. An additive mask is added to 16-bit
    scores in fp32, which keeps the differences between scores. If `widens(q)`, the weights are fp32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, T, _ = q.shape
    added = None
    # The product of scores adds a mask: one pass over the scores less.
    if mask is not None and softcap is None and (mask.dtype == torch.bool or q.is_cpu or not _in_sixteen_bits(q)):
        added = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        added = added.expand(B, H, -1, -1).flatten(0, 1)
        mask = None
    # Flattened before the transpose: bmm reads transposed keys in place, where matmul would copy them.
    scores = products(q.flatten(0, 1), k.flatten(0, 1), scale, added).view(B, H, T, k.shape[2])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else wide(scores) + mask
    if sinks is None:
        weights = softmax(scores)
    else:
        sunk = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(B, H, T, 1)], -1)
        weights = sunk.softmax(-1)[..., :-1]
    if widens(q) or (weights.is_cuda and autocasts(weights)):  # autocast on a GPU runs softmax in fp32
        return weights
    return weights.to(product_dtype(q))


def softmax(scores: Tensor) -> Tensor:
    """Return softmax over the keys, in place of scores that nothing else needs: in inference on a CPU.

    New memory for as many numbers takes as long as the softmax itself (32 MB, one core).
    """
    if type(scores) is Tensor and scores.is_cpu and not torch.is_grad_enabled() and not needs_dispatcher():
        return torch.softmax(scores, -1, out=scores)
    return scores.softmax(-1)


def _in_sixteen_bits(x: Tensor) -> bool:
    return product_dtype(x) in _SIXTEEN_BITS


def widens(x: Tensor) -> bool:
    """Return whether products with x are computed in fp32 and rounded once: 16-bit products on a CPU.

    SDPA keeps scores and sums in fp32. With scores and weights rounded to bf16, the error was 2 to 14 times SDPA's.
    """
    return x.is_cpu and _in_sixteen_bits(x)


def products(q: Tensor, k: Tensor, scale: float, added: Tensor | None = None) -> Tensor:
    """Return scale * q k^T + added of `[N, T, K]` and `[N, S, K]`; in fp32 if `widens(q)` or q is fp16.

    SDPA does so too. fp16 ends at 65,504: large scores exceed it, as do scores plus a mask of fp16's lowest number, and
    large softcaps.
    """
    dtype = product_dtype(q)
    if dtype == torch.float16 or (q.is_cpu and dtype in _SIXTEEN_BITS):
        with _without_autocast(q):
            return products(q.float(), k.float(), scale, added)
    # With beta 0, the forward-mode derivative aborts the process under a TorchDispatchMode (torch 2.13); in bf16 with
    # scale 0, baddbmm does not write its output.
    beta = 0 if added is None and scale and (compiling() or not dispatch_modes()) else 1
    added = q.new_zeros(1, 1, 1) if added is None else added.to(q.dtype)
    return torch.baddbmm(added, q, k.transpose(1, 2), beta=beta, alpha=scale)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights @ v of `[..., T, S]` and `[..., S, Kv]`, computed in fp32 and then rounded if `widens(v)`."""
    if not widens(v):  # `matmul` of more dimensions takes 5 to 10 us longer, with backward
        return torch.bmm(weights.flatten(0, -3), v.flatten(0, -3)).view(*weights.shape[:-1], v.shape[-1])
    with _without_autocast(v):
        out = weighted_sum(weights.float(), v.float())
    return out.to(product_dtype(v))


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def wide(x: Tensor) -> Tensor:
    """Return x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[B, Hkv, S, K]` to `[B, heads, S, K]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
