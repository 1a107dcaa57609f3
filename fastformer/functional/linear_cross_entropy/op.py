"""Linear layer and cross entropy in one: op, checks, registration and autograd Functions.

For a sum of losses, forward computes the gradients too, while it has the logits, and backward scales them. For single
losses (reduction "none"), backward computes the logits again.

Letters: D model width, M rows, V vocabulary.
"""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fastformer.functional.choice import runs_fused
from fastformer.functional.linear_cross_entropy import reference
from fastformer.host.autograd_function import call, define, eager_formula, needs_double_backward, plain_gradients
from fastformer.host.devices import check_probability, check_range, check_tensors, to_autocast
from fastformer.modes import readable
from fastformer.settings import check_value

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


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
    """Compute the cross entropy of x weight^T + bias and target, as `F.cross_entropy(F.linear(...), target)`.

    Args:
        x: `[..., D]`.
        weight: `[V, D]`; may be tied to an embedding.
        target: int64 `[...]`.
        bias: `[V]`, or None.
        ignore_index, label_smoothing, reduction: as in `F.cross_entropy`.

    Returns:
        The loss, a scalar; with reduction "none" that of each row, of target's shape. fp32 for x in 16 bits.

    Raises:
        ValueError, TypeError: an argument does not fit.
        IndexError: a target on the CPU is neither a class nor ignore_index.
    """
    check_tensors(("x", "weight", "target", "bias"), x, (weight, target), (bias,))
    if reduction not in REDUCTIONS:
        check_value("reduction", reduction, str, choices=REDUCTIONS)
    check_probability("label_smoothing", label_smoothing)
    if x.shape[:-1] != target.shape:
        raise ValueError(f"target must be of shape {list(x.shape[:-1])}, not {list(target.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight must be of shape [V, {x.shape[-1]}] with V of at least 1, not {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be of shape [{weight.shape[0]}], not {list(bias.shape)}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, not {target.dtype}")
    check_range("target", target, weight.shape[0] - 1, f" or be {ignore_index}", IndexError, ignore_index)
    shape, rows = target.shape, reduction == "none"
    x, target = x.reshape(math.prod(shape), x.shape[-1]), target.reshape(-1)
    settings = (target, ignore_index, label_smoothing)
    if runs_fused("linear_cross_entropy", x):
        loss = _fused((x, weight, bias), settings, rows)
    else:
        loss = reference.linear_cross_entropy(x, weight, bias, *settings, rows=rows)
    if reduction == "mean":
        count = (target != ignore_index).sum()
        if readable(count) and (number := int(count)):
            return loss / number
        # As in torch: NaN if all targets are ignored, with gradients 0.
        return torch.where(count > 0, loss / count.clamp(min=1), math.nan)
    return loss.view(shape) if rows else loss


def _forward_fake(x: Tensor, weight: Tensor, needs_grad: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((x.shape[0],), dtype=torch.float32)
    return loss, *reference.zero_gradients(x, weight, needs_grad, torch.float32, torch.float32)


def _backward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.zero_gradients(x, weight, needs_grad, weight.dtype, x.dtype if bias is None else bias.dtype)


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float smoothing, bool[3] needs_grad"
_forward = define(
    f"linear_cross_entropy({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy.kernels.forward",
    _forward_fake,
)
_backward = define(
    f"linear_cross_entropy_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    "linear_cross_entropy.kernels.backward",
    _backward_fake,
)


class LinearCrossEntropySum(torch.autograd.Function):
    """`_INPUTS`, formula -> (the sum of all losses, its gradients for x, weight and bias, empty if not needed)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss, dx, dweight, dbias = _forward(*inputs[:-1])
        return loss.sum(), dx, dweight, dbias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.formula = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, none = grads[0], (None,) * 5
        if grad is None:
            return None, None, None, *none
        x, weight, bias, *gradients = ctx.saved_tensors
        inputs = x, weight, bias
        needs_grad = ctx.needs_input_grad[:3]
        if needs_double_backward("linear_cross_entropy", formula := ctx.formula):
            return *plain_gradients(lambda *inputs: formula(*inputs).sum(), inputs, needs_grad, (grad,)), *none
        triples = zip(gradients, inputs, needs_grad, strict=True)
        return *(_scaled(dy, grad, y.dtype) if needed else None for dy, y, needed in triples), *none


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor, computed in fp32 and rounded once, in one pass.

    Beside an fp16 matrix, torch casts a factor without dimensions to fp16, so the factor gets dimensions here.
    """
    factor = factor.view([1] * gradient.dim())
    return torch.mul(gradient, factor, out=gradient.new_empty(gradient.shape, dtype=dtype))


class LinearCrossEntropyRows(torch.autograd.Function):
    """`_INPUTS` without `needs_grad`, formula -> the loss of each row."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        loss: Tensor = _forward(*inputs[:-1], [False] * 3)[0]
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ignore_index, smoothing, ctx.formula = inputs
        ctx.settings = ignore_index, smoothing
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = saved[:3]
        needs_grad = list(ctx.needs_input_grad[:3])
        if needs_double_backward("linear_cross_entropy", ctx.formula):
            gradients = plain_gradients(ctx.formula, inputs, needs_grad, grads)
        else:
            computed = _backward(grads[0], *saved, *ctx.settings, needs_grad)
            gradients = tuple(dy if needed else None for dy, needed in zip(computed, needs_grad, strict=True))
        return *gradients, None, None, None, None


def _fused(tensors: tuple[Tensor | None, ...], settings: tuple[Tensor, int, float], rows: bool) -> Tensor:
    """Run the op with its kernels; return the loss of each row, fp32 `[M]`, or their sum.

    Ignored rows take part in the matrix products, because the host would wait for their number to skip them.
    """
    formula = eager_formula(lambda x, weight, bias: reference.plain_loss(x, weight, bias, *settings), settings[0])
    tensors = to_autocast(*tensors)
    if rows:
        return call(LinearCrossEntropyRows, *tensors, *settings, formula)  # type: ignore[no-any-return]
    training = torch.is_grad_enabled()
    needs_grad = [training and y is not None and y.requires_grad for y in tensors]
    total: Tensor = call(LinearCrossEntropySum, *tensors, *settings, needs_grad, formula)[0]
    return total
