"""Fused linear + cross entropy: the op, its backward, and their autograd Functions.

For a sum of losses the gradients are computed with it, as the logits are there then, and only scaled in backward. For
single losses (reduction "none") the forward pass keeps nothing but its inputs, and backward computes the logits again.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer.autograd_function import call
from fastformer.fused.differentiation import Formula, distinct, plain_gradients, to_autocast, twice
from fastformer.fused.registration import define


def _fake_gradients(
    x: Tensor, weight: Tensor, wanted: list[bool], wide: torch.dtype | None, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    V = weight.shape[0]
    return (
        x.new_empty(x.shape if wanted[0] else (0,)),
        weight.new_empty(weight.shape if wanted[1] else (0,), dtype=wide or weight.dtype),
        x.new_empty((V,) if wanted[2] else (0,), dtype=wide or bias_dtype),
    )


def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((x.shape[0],), dtype=torch.float32)
    return loss, *_fake_gradients(x, weight, wanted, torch.float32, torch.float32)


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(x, weight, wanted, None, x.dtype if bias is None else bias.dtype)


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float smoothing, bool[3] wanted"
_forward = define(
    f"linear_cross_entropy({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_cross_entropy.kernels.forward",
    _fake_forward,
)
_backward = define(
    f"linear_cross_entropy_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    "linear_cross_entropy.kernels.backward",
    _fake_backward,
)


class LinearCrossEntropySum(torch.autograd.Function):
    """The sum of all losses; `wanted` are the gradients to compute with it."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        wanted: list[bool],
        formula: Formula | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss, dx, dweight, dbias = _forward(x, weight, bias, target, ignore_index, smoothing, wanted)
        return loss.sum(), dx, dweight, dbias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, _, _, _, ctx.formula = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, none = grads[0], (None,) * 5
        if grad is None:
            return None, None, None, *none
        x, weight, bias, *found = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if twice(formula := ctx.formula):
            given = plain_gradients(lambda *inputs: formula(*inputs).sum(), (x, weight, bias), wanted, (grad,))
            return *given, *none
        # In fp32: next to an fp16 matrix, torch reads a factor without dimensions as fp16 too.
        scaled = [
            (dy.float() * grad).to(y.dtype) if want else None
            for dy, y, want in zip(found, (x, weight, bias), wanted, strict=True)
        ]
        return *scaled, *none


class LinearCrossEntropyRows(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        formula: Formula | None,
    ) -> Tensor:
        loss: Tensor = _forward(x, weight, bias, target, ignore_index, smoothing, [False] * 3)[0]
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, target, *ctx.settings, ctx.formula = inputs
        ctx.save_for_backward(x, weight, bias, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if twice(ctx.formula):
            found = plain_gradients(ctx.formula, (x, weight, bias), wanted, grads)
        else:
            computed = _backward(grads[0], x, weight, bias, target, *ctx.settings, wanted)
            found = tuple(dy if want else None for dy, want in zip(computed, wanted, strict=True))
        return *found, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    rows: bool,
    formula: Formula | None,
) -> Tensor:
    """Cross entropy of softmax(x weight^T + bias): x `[M, D]`, weight `[V, D]`, target int64 `[M]`.

    Under autocast the logits are in its dtype, as those of `F.linear`; losses are fp32.

    Args:
        x, weight, target, bias, ignore_index, label_smoothing: as in `functional.linear_cross_entropy`. Rows that are
            ignored cost their part of the matrix products: to leave them out, their number would have to be known on
            the host. A packed batch has none. A target that is no class gives NaN.
        rows: the loss of each row, fp32 `[M]`, rather than their sum.
        formula: the losses of all rows, a function of x, weight and bias in plain PyTorch.
    """
    x, weight, bias = distinct(*to_autocast(x, weight, bias))  # type: ignore[assignment]
    if rows:
        return call(LinearCrossEntropyRows, x, weight, bias, target, ignore_index, label_smoothing, formula)  # type: ignore[no-any-return]
    training = torch.is_grad_enabled()
    wanted = [training and y is not None and y.requires_grad for y in (x, weight, bias)]
    inputs = x, weight, bias, target, ignore_index, label_smoothing, wanted, formula
    total: Tensor = call(LinearCrossEntropySum, *inputs)[0]
    return total
