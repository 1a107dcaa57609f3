"""Bias of scores by the distance of key from query, in plain PyTorch: one vector per head, expanded to a mask.

ALiBi (Press et al. 2022) and the relative bias of T5 (Raffel et al. 2020) are such vectors; the kernels need no mask.

Letters: B batch, H heads, T queries, S keys, P positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.attention.rules import AttentionRules
from fastformer.modes import exporting


def with_distances(q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor | None:
    """Merge the mask of the rules with the bias by distance.

    Args:
        q: `[B, H, T, K]`; k: `[B, Hkv, S, K]`.
        rules: of the call.

    Returns:
        The mask itself if there is no bias, else an additive mask, broadcastable to `[B, H, T, S]`.
    """
    mask = rules.mask
    if rules.distance_bias is None:
        return mask
    bias = of_pairs(rules.distance_bias, q, k, rules)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return _clamp_finite(mask + bias, q.dtype)


def of_pairs(bias: Tensor, q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor:
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
