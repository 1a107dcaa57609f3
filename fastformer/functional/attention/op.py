"""Attention: over padded batches, with its weights, and within packed sequences.

Letters: B batch, H heads, T queries, S keys, K head size of queries and keys, Kv that of values.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastformer.functional.attention import fused, packed_reference, reference
from fastformer.functional.attention.arguments import check_attention, check_packed_attention
from fastformer.functional.attention.rules import Alignment, AttentionRules, Window
from fastformer.functional.choice import is_exact_fp32, runs_fused, why_sdpa_takes
from fastformer.host.autograd_function import Formula, eager_formula
from fastformer.modes import compiling
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
    distance_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention, softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    All restrictions combine. A query that may attend to nothing gives output 0 and gradient 0. A second derivative
    needs `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` around the call, as with torch, if torch's SDPA runs it: on
    a CPU, and on a GPU where `fastformer.explain` says so.

    Args:
        q: `[B, H, T, K]`, floating point.
        k: `[B, Hkv, S, K]`; H is a multiple of Hkv (grouped-query attention).
        v: `[B, Hkv, S, Kv]`; Kv may be another head size (multi-head latent attention, DeepSeek-AI 2024).
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
        distance_bias: floating point `[H, 2 * P - 1]`, P at least T and S; added to scores like an additive mask,
            by the distance of key from query: column P - 1 + s - (t + shift) (ALiBi, Press et al. 2022; T5's relative
            bias, Raffel et al. 2020). It may require a gradient; no `[T, S]` tensor is made of it on a GPU.
        sinks: floating point `[H]`: one more score in each row of its head, without a key (Xiao et al. 2023; gpt-oss,
            OpenAI 2025), so that weights add up to less than 1. They may require a gradient.

    Returns:
        `[B, H, T, Kv]`, of q's dtype, or of autocast's dtype under autocast.

    Raises:
        ValueError, TypeError: an argument does not fit, before anything runs.
        fastformer.backend.BackendError: backend "triton" was requested and cannot run this call.
    """
    limits = mask, causal, alignment, window, query_lengths, key_lengths, key_mask
    rules = AttentionRules(*limits, softcap, dropout_p, scale, distance_bias, sinks)
    rules = check_attention(q, k, v, rules)
    if runs_fused("attention", q, lambda: fused.limit(q, k, v), lambda: why_sdpa_takes(q, k, v, rules, k.shape[2])):
        return fused.attention(q, k, v, rules, _formula(reference.attention, rules))[0]
    return reference.attention(q, k, v, rules)


def attention_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute `attention`, and return also the weights `[B, H, T, S]` that it applied, after dropout as in torch.

    The weights cost memory; a query that may attend to nothing has weights 0. options: those of `attention`.
    """
    rules = AttentionRules(mask, **options)
    rules = check_attention(q, k, v, rules)
    if runs_fused("attention_with_weights", q, lambda: fused.limit(q, k, v)):
        formula = _formula(reference.attention_with_weights, rules)
        out, weights = fused.attention(q, k, v, rules, formula, wants_weights=True)
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
    distance_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention within each of B packed sequences; no query attends across sequences.

    Args:
        q: `[T, H, K]`, the queries of all sequences, one after another.
        k: `[S, Hkv, K]`; H is a multiple of Hkv.
        v: `[S, Hkv, Kv]`.
        layout: of the sequences of q.
        key_layout: of the sequences of k and v; `layout` if None.
        causal: query t of a sequence attends to its keys s <= t + shift.
        alignment: "top_left": shift 0; "bottom_right": the last query of each sequence meets its last key.
        window, softcap, dropout_p, scale, distance_bias, sinks: as in `attention`, within each sequence; P is at least
            the longest.

    Returns:
        `[T, H, Kv]`; zeros for a sequence without keys.
    """
    key_layout = layout if key_layout is None else key_layout
    rules = AttentionRules(
        None, causal, alignment, window, None, None, None, softcap, dropout_p, scale, distance_bias, sinks
    )
    rules = check_packed_attention(q, k, v, layout, key_layout, rules)

    def slower() -> str | None:
        if compiling() or not (layout.known and key_layout.known):
            return None
        # Sequences of one length are a dense batch, which the reference passes to SDPA; others it passes in groups.
        is_dense = layout.full and key_layout.full
        return why_sdpa_takes(q, k, v, rules, key_layout.max_length) if is_dense or is_exact_fp32(q) else None

    def plain(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
        return packed_reference.packed_attention(q, k, v, layout, key_layout, rules)

    if runs_fused("packed_attention", q, lambda: fused.limit(q, k, v), slower):
        return fused.packed_attention(q, k, v, layout, key_layout, rules, _formula(plain, rules))
    return plain(q, k, v, rules)


def _formula(plain: Formula, rules: AttentionRules) -> Formula | None:
    """Wrap a reference as a function of q, k, v, mask, bias and sinks, for second derivatives of the kernels."""

    def differentiable(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None
    ) -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # the only form of SDPA that has a second derivative
            return plain(q, k, v, replace(rules, mask=mask, distance_bias=bias, sinks=sinks))

    return eager_formula(differentiable, rules.query_lengths, rules.key_lengths, rules.key_mask)
