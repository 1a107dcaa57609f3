"""Options of one attention call, the masks of its positions and distances, and rows that may attend to nothing.

Letters: B batch, H heads, T queries, S keys, K head size, P positions.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.modes import exporting, readable

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

SOFTCAPS = 1e-30, 1e30  # beyond them fp32 has no numbers for x / softcap: 0 / 0 and 0 * inf would be NaN
ALIGNMENTS: tuple[str, ...] = get_args(Alignment)


@dataclass(frozen=True, eq=False)
class AttentionRules:
    """One attention call without q, k and v; `functional.attention` documents the fields.

    `check_attention` and `check_packed_attention` return a normal form: mask has at least two dimensions; lengths are
    int64 on q's device; a side of window is None if it reaches beyond all positions; the right side is 0 if `causal`;
    window is None if it hides no key that `causal` shows; `alignment` is "top_left" if both alignments are the same;
    softcap is a float.
    """

    mask: Tensor | None = None
    causal: bool = False
    alignment: Alignment = "top_left"
    window: Window | None = None
    query_lengths: Tensor | None = None
    key_lengths: Tensor | None = None
    key_mask: Tensor | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    distance_bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of the call: the differentiable ones, then the others."""
        return self.mask, self.distance_bias, self.sinks, self.query_lengths, self.key_lengths, self.key_mask


def allowed_positions(q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor | None:
    """Combine causality, window, lengths and key mask into one bool mask, True = may attend.

    Returns:
        Broadcastable to `[B, 1, T, S]`; None if nothing is hidden.
    """
    left, right = rules.window or (None, None)  # how far to either side of position t + shift query t attends
    right = 0 if rules.causal else right
    ends = rules.query_lengths, rules.key_lengths
    real = None if rules.key_mask is None else rules.key_mask[:, None, None, :]
    if all(x is None for x in (left, right, *ends)):  # as in a step of decoding
        return real
    T, S = q.shape[2], k.shape[2]
    queries, keys = torch.arange(T, device=q.device)[:, None], torch.arange(S, device=q.device)  # [T, 1], [S]
    query_ends, key_ends = (None if x is None else x[:, None, None, None] for x in ends)  # [B, 1, 1, 1]
    allowed: list[Tensor] = []
    if left is not None or right is not None:
        centre = queries
        if rules.alignment == "bottom_right":
            centre = queries + ((S if key_ends is None else key_ends) - (T if query_ends is None else query_ends))
        if right is not None:
            allowed.append(keys <= centre + right)
        if left is not None:
            allowed.append(keys >= centre - left)
    if key_ends is not None:
        allowed.append(keys < key_ends)
    if real is not None:
        allowed.append(real)
    if query_ends is not None:
        allowed.append(queries < query_ends)
    return reduce(torch.logical_and, allowed)


def as_key_mask(mask: Tensor | None, B: int, S: int) -> Tensor | None:
    """Return a bool mask that is the same for all queries and heads as a key mask `[B, S]`; None for other masks."""
    if mask is None or mask.dtype != torch.bool:
        return None
    shape = (1, 1, 1, 1, *mask.shape)[-4:]
    return mask.reshape(shape[0], shape[3]).expand(B, S) if shape[1] == shape[2] == 1 else None


def merge_masks(mask: Tensor | None, allowed: Tensor | None) -> Tensor | None:
    """Merge a mask, bool (True = may attend) or additive, with the allowed positions; either may be None."""
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    return mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask, -math.inf)


def dead_rows(mask: Tensor) -> Tensor:
    """Return which rows of a mask, bool or additive, hide all keys: bool `[..., T, 1]`."""
    if mask.dtype == torch.bool:
        return mask.sum(-1, keepdim=True) == 0  # on a CPU in 0.3 to 0.5 of the time of `any`
    if mask.shape[-1] == 0:
        return (mask == -math.inf).all(-1, keepdim=True)
    return mask.detach().amax(-1, keepdim=True) == -math.inf


def open_dead_rows(mask: Tensor | None, allowed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Merge an arbitrary mask with the allowed positions.

    Returns:
        The merged mask, opened at queries that may attend to nothing, to avoid NaN; and these queries as a bool mask
        `[..., T, 1]`, whose outputs must be set to 0. Either may be None.
    """
    if mask is not None and readable(mask) and mask.stride(-1) > 1:
        mask = mask.contiguous()  # T5's bias is one of heads last, of which `amax` takes 40 times as long
    merged = merge_masks(mask, allowed)
    if merged is None:
        return None, None
    dead = dead_rows(merged)
    if readable(dead) and not dead.any():
        return merged, None  # without a copy of the scores' mask, and of the output
    return (merged | dead if merged.dtype == torch.bool else merged.masked_fill(dead, 0.0)), dead


def with_distances(q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor | None:
    """Merge the mask of the rules with the bias by distance.

    Returns:
        The mask itself if there is no bias, else an additive mask, broadcastable to `[B, H, T, S]`.
    """
    mask = rules.mask
    if rules.distance_bias is None:
        return mask
    bias = expand_distance_bias(rules.distance_bias, q, k, rules)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return _clamp_finite(mask + bias, q.dtype)


def expand_distance_bias(bias: Tensor, q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor:
    """Expand a bias `[H, 2 * P - 1]` to `[B or 1, H, T, S]`, in fp32 at least, because gradients accumulate in it.

    Row t is row t - 1 moved by one column, so rows are windows of one vector; row T - 1 is the first window.
    """
    T, S = q.shape[2], k.shape[2]
    bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    bias = _clamp_finite(bias, q.dtype)
    first = (bias.shape[1] + 1) // 2 - T  # the column of query T - 1 and key 0, without the shift
    bias = F.pad(bias, (0, 1))  # one more column, so that T = 0 is no special case
    shift: Tensor | int = 0
    if rules.alignment == "bottom_right":
        lengths = (
            (S if rules.key_lengths is None else rules.key_lengths[:, None]),
            (T if rules.query_lengths is None else rules.query_lengths[:, None]),
        )
        shift = lengths[0] - lengths[1]
    if isinstance(shift, Tensor):
        columns = torch.arange(T + S, device=q.device) + (first - shift)  # [B, T + S], clamped where they are padding
        rows = bias[:, columns.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
    else:
        rows = bias.narrow(1, first - shift, T + S)[None]
    if exporting():  # torch.export makes sizes of windows constants
        return rows[..., torch.arange(S, device=q.device) + torch.arange(T - 1, -1, -1, device=q.device)[:, None]]
    return rows.unfold(-1, S, 1)[..., :T, :].flip(-2)


def _clamp_finite(added: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp finite values to the scores' dtype if that is narrower: as -inf they would hide keys."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(added.dtype).min >= lowest:
        return added
    return torch.where(added == -math.inf, added, added.clamp(min=lowest))
