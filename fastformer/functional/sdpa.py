"""A drop-in for `torch.nn.functional.scaled_dot_product_attention` (SDPA) that skips what a mask hides.

Letters: B batch, H heads, T queries, S keys, K head size.
"""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.functional.attention.op import attention
from fastformer.functional.attention.reference import attend_in_spans
from fastformer.functional.attention.rules import AttentionRules
from fastformer.functional.attention.spans import SHORTEST, Span, faster_in_spans, first_and_end
from fastformer.functional.choice import unsupported
from fastformer.modes import function_modes, has_values, needs_dispatcher

_SDPA = F.scaled_dot_product_attention


class _Visible(NamedTuple):
    """The visible part of a mask: queries and keys of each row of the batch, and of these all pairs or those s <= t."""

    spans: list[Span] | None  # of each row, on a CPU; None if hidden keys or queries lie between visible ones
    causal: bool
    queries: Tensor | None  # bool [B, T], True = visible; None: all are
    keys: Tensor | None  # bool [B, S], likewise


# For a mask, or the tensor that it is a view of: its version with the sizes of the last call, and its visible part.
# On a CPU a copy of the mask is stored too, because numpy can change a mask without a new version. Only the last view
# is stored: slices of a buffer for sequences of many lengths would take memory without end.
_remembered: MutableMapping[Tensor, Any] = WeakTensorKeyDictionary()


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` without the keys and queries that a mask hides.

    Reads masks of padding and causality: `[B, 1, 1, S]`, `[B, 1, T, S]` or `[T, S]`, bool or of 0 and -inf, with
    padding on the left or right. A mask is read once: layers that get the same mask, or the same view of one, share the
    result until it is changed in place. In inference mode, whose tensors count no changes, each call reads its mask.
    Replayed CUDA graphs count none either: pass a clone of a mask that one writes, such as the output of a function
    compiled with mode "reduce-overhead".
    Every other call goes to SDPA unchanged: other masks, `torch.compile`, and on a CPU fewer than 128 tokens, or little
    padding.

    Args:
        query: `[B, H, T, K]`, and the others as in SDPA. Dropout draws other numbers than SDPA from the same seed.

    Returns:
        SDPA's result; 0 for a query that may attend to nothing, which SDPA on a GPU does not always give.
    """
    inputs = query, key, value
    visible = None if attn_mask is None or is_causal else _visible(*inputs, attn_mask, enable_gqa)
    if visible is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
    if _uses_kernels(query):
        out = attention(query, key, value, causal=visible.causal, key_mask=visible.keys, **options)
        return out if visible.queries is None else out.masked_fill(~visible.queries[:, None, :, None], 0.0)
    assert visible.spans is not None
    rules = AttentionRules(causal=visible.causal, **options)
    return attend_in_spans(query, key, value, rules, visible.spans)


class CallsSdpa(TorchFunctionMode):
    """Replaces calls of `F.scaled_dot_product_attention` by `sdpa` inside a `with` block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (sdpa if func is _SDPA else func)(*args, **(kwargs or {}))


def _visible(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, grouped: bool) -> _Visible | None:
    """Return the visible part of a call's mask; None if the call cannot skip the rest, or is not faster so."""
    inputs = query, key, value, mask
    if needs_dispatcher() or function_modes() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in inputs):
        return None
    if not all(x.dim() == 4 for x in inputs[:3]) or mask.requires_grad or not has_values(mask):
        return None
    (B, H, T, _), S = query.shape, key.shape[2]
    heads_fit = key.shape[1] == value.shape[1] and (grouped or key.shape[1] == H)
    if not (heads_fit and key.shape[0] == value.shape[0] == B and B * T * S):
        return None
    kernels = _uses_kernels(query)
    if not kernels and (not query.is_cpu or min(T, S) < SHORTEST):
        return None
    visible = _read(mask, B, T, S)
    if visible is None or kernels:
        return visible
    spans = visible.spans
    return visible if spans is not None and faster_in_spans(T, S, spans) else None


def _uses_kernels(query: Tensor) -> bool:
    return query.is_cuda and unsupported("attention", query) is None


def _read(mask: Tensor, B: int, T: int, S: int) -> _Visible | None:
    """Return the visible part of a mask, cached if possible; None for masks that `sdpa` does not read."""
    if mask.dim() == 2:
        mask = mask[None]
    elif mask.dim() == 4 and mask.shape[0] in (1, B) and (mask.shape[1] == 1 or mask.stride(1) == 0):
        mask = mask[:, 0]
    else:
        return None
    if mask.shape[1:] not in ((1, S), (T, S)) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    if mask.is_inference():
        return _find(mask, B, T)
    base = mask if mask._base is None else mask._base
    call = base._version, B, T, mask.shape, mask.stride(), mask.storage_offset()
    shown = mask[:1] if mask.stride(0) == 0 else mask
    last = _remembered.get(base)
    if last is None or last[0] != call or not (last[2] is None or torch.equal(last[2], shown)):
        last = _remembered[base] = call, _find(mask, B, T), shown.clone() if mask.is_cpu else None
    visible: _Visible | None = last[1]
    return visible


@torch.no_grad()
def _find(mask: Tensor, B: int, T: int) -> _Visible | None:
    """Return the visible part of a mask `[1 or B, 1 or T, S]`; None if it hides more than padding and later keys."""
    shown = mask
    if mask.dtype != torch.bool:
        shown = mask == 0
        if not bool((shown | (mask == float("-inf"))).all()):
            return None
    keys, queries = shown.any(1), shown.any(2)
    causal = False
    if mask.shape[1] > 1:
        pairs = queries[:, :, None] & keys[:, None]
        if not torch.equal(shown, pairs):
            if mask.shape[1] != mask.shape[2] or not torch.equal(shown, pairs.tril()):
                return None
            causal = True
    keys, queries = keys.expand(B, -1), queries.expand(B, T)
    spans = _spans(queries, keys, causal) if mask.is_cpu else None
    all_queries = mask.shape[1] == 1 or bool(queries.all())
    return _Visible(spans, causal, None if all_queries else queries, None if bool(keys.all()) else keys)


def _spans(queries: Tensor, keys: Tensor, causal: bool) -> list[Span] | None:
    """Return the spans of visible queries `[B, T]` and keys `[B, S]`, or None if a row has gaps."""
    query_span, key_span = first_and_end(queries), first_and_end(keys)
    if query_span is None or key_span is None:
        return None
    spans = list(map(Span, *query_span, *key_span))
    # SDPA's is_causal counts from the first query and the first key.
    return None if causal and any(span.first != span.first_key for span in spans) else spans
