"""Attention: over padded batches, with its weights, and within packed sequences; the checks of its arguments.

Letters: B batch, H heads, T queries, S keys, K head size of queries and keys, Kv that of values, P positions.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastformer.functional.attention import fused, packed_reference, reference
from fastformer.functional.attention.rules import ALIGNMENTS, SOFTCAPS, Alignment, AttentionRules, Window
from fastformer.functional.choice import is_torchs, on_plain_cores, runs_fused, why_sdpa_takes
from fastformer.host.autograd_function import Formula, eager_formula
from fastformer.host.devices import (
    DeviceError,
    check_probability,
    check_range,
    check_tensors,
    product_dtype,
)
from fastformer.modes import compiling, exporting
from fastformer.packing import Layout, offsets_of
from fastformer.settings import check_value


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

    All restrictions combine. A query that may attend to nothing gives output 0 and gradient 0. Where torch's SDPA runs
    (see `fastformer.explain`), a second derivative needs `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

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
    no_masks = mask is None and key_lengths is None and key_mask is None
    if no_masks and is_torchs(q, k, v) and type(k) is type(v) is Tensor and q.dim() == 4:
        others = window, query_lengths, softcap, scale, distance_bias, sinks
        plain = alignment == "top_left" and not dropout_p and all(x is None for x in others)
        if plain and q.shape == k.shape == v.shape and q.numel():
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # the checks below take 6 us
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

    The weights take memory for B * H * T * S numbers. A query that may attend to nothing has weights 0.

    options: those of `attention`.
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
        k, v: `[S, Hkv, K]` and `[S, Hkv, Kv]`; H is a multiple of Hkv.
        layout, key_layout: of the sequences of q, and of k and v; the same if None.
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
        if not is_dense and not on_plain_cores(q, max(q.shape[-1], v.shape[-1])):
            return None
        return why_sdpa_takes(q, k, v, rules, key_layout.max_length)

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


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same head size, not {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must have the same number of heads, not {k.shape[1]} and {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q ({q.shape[1]}) must be a multiple of those of k ({k.shape[1]})")


def _check_lengths(name: str, lengths: Tensor, x_name: str, x: Tensor) -> Tensor:
    """Return the lengths of sequences in x `[B, H, L, K]`, int64 on its device; values are checked on the CPU only.

    Lengths may be on the CPU, where batches keep them.
    """
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{name} must be a Tensor, not {type(lengths).__name__}")
    if not lengths.is_cpu and lengths.device != x.device:
        raise DeviceError(f"{name} is on {lengths.device}, {x_name} on {x.device}: move it there or to the CPU")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, not {lengths.dtype}")
    if lengths.shape != (x.shape[0],):
        raise ValueError(f"{name} must be of shape [{x.shape[0]}], not {list(lengths.shape)}")
    lengths = lengths.to(torch.int64)  # beyond int64, unsigned numbers become negative ones
    check_range(name, lengths, x.shape[2], f", the length of {x_name}")
    return lengths.to(x.device)


def _check_masks(q: Tensor, k: Tensor, mask: Tensor | None, key_mask: Tensor | None) -> None:
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask must be bool or floating point, not {mask.dtype}")
        if mask.dim() > 4 or any(m != 1 and m != f for m, f in zip(reversed(mask.shape), reversed(full), strict=False)):
            raise ValueError(f"mask must be broadcastable to {list(full)}, not of shape {list(mask.shape)}")
    if key_mask is not None:
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool, not {key_mask.dtype}")
        if key_mask.shape != (q.shape[0], k.shape[2]):
            raise ValueError(f"key_mask must be of shape {[q.shape[0], k.shape[2]]}, not {list(key_mask.shape)}")


def _check_per_head(heads: int, longest: int, rules: AttentionRules) -> None:
    """Check distance_bias and sinks; longest: the longest sequence of queries or keys."""
    bias, sinks = rules.distance_bias, rules.sinks
    for name, x in (("distance_bias", bias), ("sinks", sinks)):
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, not {x.dtype}")
    if bias is not None:
        if bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] % 2 == 0:
            raise ValueError(f"distance_bias must be of shape [{heads}, 2 * P - 1], not {list(bias.shape)}")
        if bias.shape[1] < 2 * longest - 1:
            P = (bias.shape[1] + 1) // 2
            raise ValueError(
                f"distance_bias must be of at least {longest} positions, the longest of queries and keys, not {P}"
            )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be of shape [{heads}], not {list(sinks.shape)}")


def _in_dtype_of_scores(mask: Tensor, q: Tensor) -> Tensor:
    """Cast an additive mask to the dtype of the scores if that is narrower, as torch does.

    That dtype decides which keys are hidden: fp32's lowest number becomes -inf in bf16, and -1e9 in fp16.
    """
    dtype = product_dtype(q)
    fits = mask.dtype == torch.bool or torch.promote_types(mask.dtype, dtype) == dtype
    return mask if fits else mask.to(dtype)


def check_window(window: object) -> None:
    """Raise ValueError unless window is None or a valid tuple (left, right)."""
    sides = window if isinstance(window, tuple) else ()
    valid = len(sides) == 2 and all(side is None or (type(side) is int and side >= 0) for side in sides)
    if window is not None and not valid:
        raise ValueError(f"window must be a tuple (left, right) of integers of at least 0 or None, not {window!r}")


def check_softcap(softcap: float | None) -> float | None:
    """Return softcap as a float or None; raise ValueError if it is no valid softcap."""
    if softcap is None:
        return None
    low, high = SOFTCAPS
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not low <= softcap <= high:
        raise ValueError(f"softcap must be a number between {low} and {high}, not {softcap!r}")
    return float(softcap)


def _effective_window(window: Window, causal: bool, length: int) -> Window | None:
    """Return the window combined with causality, or None if it hides no more keys than `causal` does.

    Args:
        length: of the longest sequence of queries or keys; a side of at least that length limits nothing.
    """
    check_window(window)
    # An exported program is for all lengths: no length may decide which sides it keeps.
    lengths_known = not exporting()
    left, right = (None if side is None or (lengths_known and side >= length) else side for side in window)
    if left is None and (causal or right is None):
        return None
    return left, 0 if causal else right


def _normal_form(
    rules: AttentionRules,
    longest: int,
    same_lengths: bool,
    mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> AttentionRules:
    """Check the rules' numbers, and return the rules in normal form, with the mask and lengths given.

    Args:
        longest: the longest sequence of queries or keys.
        same_lengths: whether each sequence has as many queries as keys.
    """
    if not 0.0 <= rules.dropout_p <= 1.0:
        check_probability("dropout_p", rules.dropout_p)
    if rules.alignment not in ALIGNMENTS:
        check_value("alignment", rules.alignment, str, choices=ALIGNMENTS)
    window = None if rules.window is None else _effective_window(rules.window, rules.causal, longest)
    by_position = rules.causal or window is not None or rules.distance_bias is not None
    alignment = rules.alignment if by_position and not same_lengths else "top_left"
    softcap = None if rules.softcap is None else check_softcap(rules.softcap)
    numbers = alignment == rules.alignment and window is rules.window and softcap == rules.softcap
    if numbers and mask is rules.mask and query_lengths is rules.query_lengths and key_lengths is rules.key_lengths:
        return rules  # saves 2 us
    tensors: Any = {"mask": mask, "query_lengths": query_lengths, "key_lengths": key_lengths}
    return replace(rules, alignment=alignment, window=window, softcap=softcap, **tensors)


def check_attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> AttentionRules:
    """Check one call of `attention` and return its rules in normal form (`AttentionRules`)."""
    names = ("q", "k", "v", "mask", "key_mask", "distance_bias", "sinks")
    check_tensors(names, q, (k, v), (rules.mask, rules.key_mask, rules.distance_bias, rules.sinks))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be of shape [batch, heads, length, head size], not {list(x.shape)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have the same batch: {q.shape[0]}, {k.shape[0]}, {v.shape[0]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v must have the same length, not {k.shape[2]} and {v.shape[2]}")
    _check_heads(q, k, v)
    _check_masks(q, k, rules.mask, rules.key_mask)
    if rules.distance_bias is not None or rules.sinks is not None:
        _check_per_head(q.shape[1], max(q.shape[2], k.shape[2]), rules)
    mask, query_lengths, key_lengths = rules.mask, rules.query_lengths, rules.key_lengths
    if mask is not None:
        mask = _in_dtype_of_scores(mask, q)
        mask = mask.expand(1, mask.numel()) if mask.dim() < 2 else mask  # SDPA takes [T, S] at least
    if query_lengths is not None:
        query_lengths = _check_lengths("query_lengths", query_lengths, "q", q)
    if key_lengths is not None:
        key_lengths = _check_lengths("key_lengths", key_lengths, "k", k)
    same_lengths = query_lengths is None and key_lengths is None and q.shape[2] == k.shape[2]
    return _normal_form(rules, max(q.shape[2], k.shape[2]), same_lengths, mask, query_lengths, key_lengths)


def check_packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, key_layout: Layout, rules: AttentionRules
) -> AttentionRules:
    """Check one call of `packed_attention` and return its rules in normal form; they hold no mask."""
    names = ("q", "k", "v", "layout", "key_layout", "distance_bias", "sinks")
    offsets = offsets_of("layout", layout), offsets_of("key_layout", key_layout)
    check_tensors(names, q, (k, v, *offsets), (rules.distance_bias, rules.sinks))
    for name, x, total in (("q", q, layout.total), ("k", k, key_layout.total), ("v", v, key_layout.total)):
        if x.dim() != 3 or x.shape[0] != total:
            raise ValueError(f"{name} must be of shape [{total}, heads, head size], not {list(x.shape)}")
    if layout is not key_layout and layout.batch != key_layout.batch:
        raise ValueError(f"layout has {layout.batch} sequences, key_layout {key_layout.batch}")
    _check_heads(q, k, v)
    longest = max(layout.max_length, key_layout.max_length)
    if rules.distance_bias is not None or rules.sinks is not None:
        _check_per_head(q.shape[1], longest, rules)
    return _normal_form(rules, longest, layout is key_layout)
