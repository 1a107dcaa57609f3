"""Attention: over padded batches, with its weights, and within packed sequences.

Letters: B batch, H heads, T queries, S keys, K head size.
"""

from dataclasses import replace

from torch import Tensor

from fastformer import reference
from fastformer.arguments import Alignment, AttentionRules, Window, check_attention, check_packed_attention
from fastformer.functional.choice import eager_formula, runs_fused
from fastformer.fused.attention import attention as fused_attention
from fastformer.fused.attention import limit as attention_limit
from fastformer.fused.attention import packed_attention as fused_packed_attention
from fastformer.packed_reference import packed_attention as packed_attention_reference
from fastformer.packing import Layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    All restrictions given combine. A query that may attend to nothing gives output 0 and gradient 0.

    Args:
        q: `[B, H, T, K]`, floating point.
        k: `[B, Hkv, S, K]`; H is a multiple of Hkv (grouped-query attention).
        v: `[B, Hkv, S, Kv]`.
        mask: as in SDPA: bool (True = may attend) or additive, broadcastable to `[B, H, T, S]`; an additive mask may
            require a gradient.
        causal: query t attends to keys s <= t + shift.
        alignment: "top_left": shift 0, as SDPA's `is_causal`; "bottom_right": the last query of a sequence meets its
            last key, shift = key length - query length (S - T without lengths).
        window: (left, right): query t attends to keys t + shift - left <= s <= t + shift + right, None: no limit on
            that side (Beltagy et al. 2020).
        query_lengths: integers `[B]`; outputs of later queries are 0.
        key_lengths: integers `[B]`; later keys are padding.
        key_mask: bool `[B, S]`, True = a real key; for padding on the left or with gaps.
        softcap: scaled scores x become softcap * tanh(x / softcap) before the mask is added (Gemma 2, 2024).
        dropout_p: dropout of the attention weights; applied whenever it is not 0.
        scale: K ** -0.5 if None.

    Returns:
        `[B, H, T, Kv]`, of q's dtype, under autocast of autocast's.

    Raises:
        ValueError, TypeError: an argument does not fit, before anything runs.
        fastformer.backend.BackendError: backend "triton" was asked for and cannot run this.
    """
    rules = AttentionRules(
        mask, causal, alignment, window, query_lengths, key_lengths, key_mask, softcap, dropout_p, scale
    )
    rules = check_attention(q, k, v, rules)
    if runs_fused("attention", q, lambda: attention_limit(q, k, v)):
        formula = eager_formula(
            lambda q, k, v, mask: reference.attention(q, k, v, replace(rules, mask=mask)), *rules.tensors[1:]
        )
        return fused_attention(q, k, v, rules, formula)[0]
    return reference.attention(q, k, v, rules)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied, after dropout as in torch.

    Costs memory for the weights; a query that may attend to nothing has weights 0.
    """
    rules = AttentionRules(
        mask, causal, alignment, window, query_lengths, key_lengths, key_mask, softcap, dropout_p, scale
    )
    rules = check_attention(q, k, v, rules)
    if runs_fused("attention_with_weights", q, lambda: attention_limit(q, k, v)):
        formula = eager_formula(
            lambda q, k, v, mask: reference.attention_with_weights(q, k, v, replace(rules, mask=mask)),
            *rules.tensors[1:],
        )
        out, weights = fused_attention(q, k, v, rules, formula, wants_weights=True)
        assert weights is not None
        return out, weights
    return reference.attention_with_weights(q, k, v, rules)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout | None = None,
    *,
    causal: bool = False,
    alignment: Alignment = "top_left",
    window: Window | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention within each of B packed sequences; none attends across sequences.

    Args:
        q: `[T, H, K]`, the queries of all sequences, one after another.
        k: `[S, Hkv, K]`; H is a multiple of Hkv.
        v: `[S, Hkv, Kv]`.
        layout: where the sequences of q lie.
        key_layout: where those of k and v lie; `layout` if None.
        causal: query t of a sequence attends to its keys s <= t + shift.
        alignment: "top_left": shift 0; "bottom_right": the last query of each sequence meets its last key.
        window, softcap, dropout_p, scale: as in `attention`, within each sequence.

    Returns:
        `[T, H, Kv]`; zeros for a sequence without keys.
    """
    key_layout = layout if key_layout is None else key_layout
    rules = AttentionRules(
        causal=causal, alignment=alignment, window=window, softcap=softcap, dropout_p=dropout_p, scale=scale
    )
    rules = check_packed_attention(q, k, v, layout, key_layout, rules)
    if runs_fused("packed_attention", q, lambda: attention_limit(q, k, v)):
        formula = eager_formula(lambda q, k, v: packed_attention_reference(q, k, v, layout, key_layout, rules))
        return fused_packed_attention(q, k, v, layout, key_layout, rules, formula)
    return packed_attention_reference(q, k, v, layout, key_layout, rules)
