"""The last linear layer and the loss in one, whose logits never exist all at once.

Letters: D model width, M rows, V vocabulary.
"""

import math

from torch import Tensor

from fastformer import reference
from fastformer.arguments import REDUCTIONS, Reduction, check_choice, check_classes, check_probability
from fastformer.functional.choice import eager_formula, runs_fused
from fastformer.fused.linear_cross_entropy import linear_cross_entropy as fused_linear_cross_entropy
from fastformer.host.devices import check_tensors


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross entropy of softmax(x weight^T + bias) against target, as `F.cross_entropy(F.linear(...), target)`.

    Args:
        x: `[M, D]` or `[..., D]`.
        weight: `[V, D]`; may be tied to an embedding.
        target: int64, of x's shape without the last dimension.
        bias: `[V]`, or None.
        ignore_index: targets of this value count for nothing.
        label_smoothing: share of the probability spread over all classes (Szegedy et al. 2016).
        reduction: "mean" over the targets that count, "sum", or "none" (of target's shape).

    Raises:
        ValueError, TypeError: an argument does not fit.
        IndexError: a target on the CPU is no class.
    """
    check_tensors(("x", "weight", "target", "bias"), x, (weight, target), (bias,))
    check_choice("reduction", reduction, REDUCTIONS)
    check_probability("label_smoothing", label_smoothing)
    if x.shape[:-1] != target.shape:
        raise ValueError(f"target must be of shape {list(x.shape[:-1])}, not {list(target.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be of shape [V, {x.shape[-1]}], not {list(weight.shape)}")
    if weight.shape[0] == 0:
        raise ValueError(f"weight must be of shape [V, {x.shape[-1]}] with V of at least 1, not {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be of shape [{weight.shape[0]}], not {list(bias.shape)}")
    check_classes(target, weight.shape[0], ignore_index)
    shape = target.shape
    x, target = x.reshape(math.prod(shape), x.shape[-1]), target.reshape(-1)
    if runs_fused("linear_cross_entropy", x):
        loss = fused_linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            rows=reduction == "none",
            formula=eager_formula(
                lambda x, w, b: reference.linear_cross_entropy(
                    x, w, target, b, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
                ),
                target,
            ),
        )
        loss = reference.mean_of_targets(loss, target, ignore_index) if reduction == "mean" else loss
    else:
        loss = reference.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    return loss.view(shape) if reduction == "none" else loss
