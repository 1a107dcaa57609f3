"""Check the arguments of attention, and bring its rules into the normal form that `AttentionRules` describes.

Letters: B batch, H heads, T queries, S keys, K head size of queries and keys, P positions.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastformer.functional.attention.rules import ALIGNMENTS, SOFTCAPS, AttentionRules, Window
from fastformer.host.devices import DeviceError, check_choice, check_probability, check_tensors, product_dtype
from fastformer.modes import exporting, readable
from fastformer.packing import Layout, offsets_of


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
    unsigned = lengths.dtype == torch.uint64
    lengths = lengths.to(torch.int64)  # torch has no min() of unsigned integers
    if readable(lengths):
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > x.shape[2]:
            invalid = low if low < 0 else high
            invalid += 2**64 if low < 0 and unsigned else 0
            raise ValueError(f"{name} must lie between 0 and the length of {x_name}, {x.shape[2]}: {invalid}")
    return lengths.to(x.device, torch.int64)


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
    """Raise TypeError or ValueError unless window is None or a valid tuple (left, right)."""
    if window is None:
        return
    if not isinstance(window, tuple):
        raise TypeError(f"window must be a tuple (left, right), not {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"window must be a tuple (left, right), not of {len(window)} elements")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window must hold integers or None, not {side!r}")
        if side is not None and side < 0:
            raise ValueError(f"window must not hold negative numbers: {side}")


def check_softcap(softcap: float | None) -> float | None:
    """Return softcap as a float or None; raise TypeError or ValueError if it is no valid softcap."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"softcap must be a number, not {type(softcap).__name__}")
    if not (0 < softcap < math.inf):
        raise ValueError(f"softcap must be positive and finite, not {softcap}")
    low, high = SOFTCAPS
    if not low <= softcap <= high:
        raise ValueError(f"softcap must lie between {low} and {high}, not {softcap}")
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
        check_choice("alignment", rules.alignment, ALIGNMENTS)
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
