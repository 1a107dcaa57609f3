"""Attention over long sequences, a block of queries at a time, so that no `[T, S]` tensor is ever whole.

SDPA keeps no scores, but takes its mask whole, and keeps a copy in fp32 for backward: 17 GB for 65,536 positions. Here
the mask of a block is made when its queries' turn comes, forward and once more backward, over the keys that the window
lets them see. The same for the weights where SDPA has no fused path.

Letters: B batch, H heads, T queries, S keys, K head size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastformer.functional.attention.distances import moved
from fastformer.functional.attention.rules import AttentionRules
from fastformer.modes import readable, recorded, transformed

# Masks or weights of more elements than this (0.5 GiB in fp32) are not made whole: 11,585 positions of one sequence ...
_LARGEST = 1 << 27
# ... but in blocks of so many, and so many queries at most where a window limits the keys.
_BLOCK = 1 << 24
_ROWS = 256


def rows_at_once(q: Tensor, k: Tensor, rules: AttentionRules, weights: bool) -> int:
    """Return how many queries may attend at once: T where that takes little memory.

    Args:
        q: `[B, H, T, K]`; k: `[B, Hkv, S, K]`.
        rules: of the call; they make a mask.
        weights: whether the weights of all heads are made.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    if recorded() or transformed():  # checkpoints are not for torch.func
        return T
    batch, heads = (B, H) if weights else (1, 1)
    left, right = rules.band
    by_query = weights or left is not None or right is not None or rules.query_lengths is not None
    if any(x is not None for x in (rules.query_lengths, rules.key_lengths, rules.key_mask)):
        batch = B
    if rules.mask is not None:
        shape = (1, 1, *rules.mask.shape)[-4:]
        batch, heads, by_query = max(batch, shape[0]), max(heads, shape[1]), by_query or shape[2] > 1
    if rules.distance_bias is not None:
        heads, by_query = H, True
    if not by_query or batch * heads * T * S <= _LARGEST:
        return T
    if left is None or right is None:
        return max(1, _BLOCK // (batch * heads * S))
    return max(1, min(_ROWS, _BLOCK // (batch * heads * min(S, left + right + _ROWS))))


def attend_in_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionRules], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: AttentionRules,
    rows: int,
) -> Tensor:
    """Attend from so many queries at a time; backward computes each block once more.

    Args:
        attend: attention of a block, a function of its q, k, v and rules.
        q, k, v, rules: of the whole call.
        rows: of a block.
    """
    T, S = q.shape[2], k.shape[2]
    rules, shifts = _absolute(rules, T, S)
    outs = []
    for first in range(0, T, rows):
        last = min(first + rows, T)
        keys = _keys(rules, shifts, first, last, S)
        its = q[:, :, first:last], k[:, :, keys], v[:, :, keys]
        of_block = _rules_of_block(rules, slice(first, last), keys)
        if torch.is_grad_enabled():
            # As arguments, which are kept the way autograd keeps tensors: it notices if one is changed in place.
            outs.append(checkpoint(_with_tensors, attend, of_block, *its, *of_block.tensors, use_reentrant=False))
        else:
            outs.append(attend(*its, of_block))
    return torch.cat(outs, 2)


def _with_tensors(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionRules], Tensor],
    rules: AttentionRules,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Tensor | None,
) -> Tensor:
    return attend(q, k, v, rules.with_tensors(*tensors))


def _absolute(rules: AttentionRules, T: int, S: int) -> tuple[AttentionRules, tuple[int, int] | None]:
    """Say the alignment without T and S, which a block does not have.

    Returns:
        The rules, with a window in place of `causal`, and the least and largest shift that it leaves to the lengths;
        None where nobody may look at them.
    """
    left, right = rules.band
    q_ends, k_ends = rules.query_lengths, rules.key_lengths
    if rules.alignment == "top_left" or (q_ends is None and k_ends is None):
        shift = 0 if rules.alignment == "top_left" else S - T
        rules = replace(rules, causal=False, alignment="top_left", window=_moved((left, right), shift))
        return moved(rules, -shift, max(T, S)), (0, 0)
    if q_ends is None:
        q_ends = torch.full_like(k_ends, T)  # type: ignore[arg-type]
    if k_ends is None:
        k_ends = torch.full_like(q_ends, S)
    rules = replace(rules, causal=False, window=(left, right), query_lengths=q_ends, key_lengths=k_ends)
    shifts = k_ends - q_ends
    return rules, (int(shifts.min()), int(shifts.max())) if readable(shifts) else None


def _moved(window: tuple[int | None, int | None], shift: int) -> tuple[int | None, int | None]:
    left, right = window
    return None if left is None else left - shift, None if right is None else right + shift


def _keys(rules: AttentionRules, shifts: tuple[int, int] | None, first: int, last: int, S: int) -> slice:
    """Return the keys that the window lets queries first..last - 1 see, and perhaps more."""
    left, right = rules.band
    if shifts is None:
        return slice(0, S)
    low = 0 if left is None else min(max(first + shifts[0] - left, 0), S)
    high = S if right is None else min(max(last + shifts[1] + right, low), S)
    return slice(low, high)


def _rules_of_block(rules: AttentionRules, queries: slice, keys: slice) -> AttentionRules:
    """Count positions from the first query and key of a block. Lengths take the shift of "bottom_right" with them."""
    shift = queries.start - keys.start if rules.alignment == "top_left" else 0
    mask = rules.mask
    if mask is not None:
        mask = mask[..., queries if mask.shape[-2] > 1 else slice(None), keys if mask.shape[-1] > 1 else slice(None)]
    if rules.alignment == "top_left":
        rules = moved(rules, -shift, max(queries.stop - queries.start, keys.stop - keys.start))
    return replace(
        rules,
        mask=mask,
        window=_moved(rules.band, shift),
        query_lengths=None if rules.query_lengths is None else rules.query_lengths - queries.start,
        key_lengths=None if rules.key_lengths is None else rules.key_lengths - keys.start,
        key_mask=None if rules.key_mask is None else rules.key_mask[:, keys],
    )
