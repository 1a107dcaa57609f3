"""What is added to scores by the distance of key from query, in plain PyTorch: a vector a head, made a mask of.

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
    """Return the mask of the rules with the bias in it: all that is added to scores, or hides them.

    Args:
        q: `[B, H, T, K]`; k: `[B, Hkv, S, K]`.
        rules: of the call.

    Returns:
        The mask itself where there is no bias, else an additive one, broadcastable to `[B, H, T, S]`.
    """
    mask = rules.mask
    if rules.distance_bias is None:
        return mask
    bias = of_pairs(rules.distance_bias, q, k, rules)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -math.inf)
    return _kept_finite(mask + bias, q.dtype)


def of_pairs(bias: Tensor, q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor:
    """Write a bias `[H, 2 * P - 1]` out as `[B or 1, H, T, S]`, in fp32 at least: gradients add up in that.

    Row t is the row before it, moved by one: windows of one vector, of which row T - 1 comes first.
    """
    T, S = q.shape[2], k.shape[2]
    bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    bias = _kept_finite(bias, q.dtype)
    first = (bias.shape[1] + 1) // 2 - T  # the column of query T - 1 and key 0, but for the shift
    bias = F.pad(bias, (0, 1))  # one more, so that no queries are a case like any other
    shift: Tensor | int = 0
    if rules.alignment == "bottom_right":
        ends = (
            (S if rules.key_lengths is None else rules.key_lengths[:, None]),
            (T if rules.query_lengths is None else rules.query_lengths[:, None]),
        )
        shift = ends[0] - ends[1]
    if isinstance(shift, Tensor):
        at = torch.arange(T + S, device=q.device) + (first - shift)  # [B, T + S]; what lies beyond is of padding
        rows = bias[:, at.clamp(0, bias.shape[1] - 1)].transpose(0, 1)
    else:
        rows = bias.narrow(1, first - shift, T + S)[None]
    if exporting():  # torch takes the sizes of windows for constants
        return rows[..., torch.arange(S, device=q.device) + torch.arange(T - 1, -1, -1, device=q.device)[:, None]]
    return rows.unfold(-1, S, 1)[..., :T, :].flip(-2)


def _kept_finite(added: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores so that what is finite hides nothing in their dtype either, if narrower."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(added.dtype).min >= lowest:
        return added
    return torch.where(added == -math.inf, added, added.clamp(min=lowest))
