"""The fused step between two sublayers: s = residual + dropout(x), y = layer_norm(s).

Kept for backward, beside the weight: s, its mean and 1 / sqrt(var + eps) of each row in fp32, and the seed of the
dropout mask; neither x nor the residual nor a mask.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer.autograd_function import call
from fastformer.fused.differentiation import Formula, distinct, twice
from fastformer.fused.layer_norm import as_row, as_rows, gradient_dtypes, norm_gradients, output_dtype
from fastformer.fused.registration import define, dropout_seed


def _forward_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return y, s, x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


def _backward_fake(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    dresidual: torch.dtype | None,
    dx: torch.dtype | None,
    dw: torch.dtype | None,
    db: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual_grad, x_grad = (s.new_empty(0 if dtype is None else s.shape, dtype=dtype) for dtype in (dresidual, dx))
    w_grad, b_grad = (s.new_empty(0 if dtype is None else s.shape[1], dtype=dtype) for dtype in (dw, db))
    return residual_grad, x_grad, w_grad, b_grad


_forward = define(
    "dropout_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, "
    "float dropout_p, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "norms.dropout_add_layer_norm.forward",
    _forward_fake,
)
_backward = define(
    "dropout_add_layer_norm_backward(Tensor? dy, Tensor? ds, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, "
    "Tensor? seed, float dropout_p, ScalarType? dresidual, ScalarType? dx, ScalarType? dw, ScalarType? db) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "norms.dropout_add_layer_norm.backward",
    _backward_fake,
)


class _DropoutAddLayerNorm(torch.autograd.Function):
    """x, residual `[M, N]` -> (y `[M, N]`, s `[M, N]`, mean `[M]`, rstd `[M]`)."""

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        dropout_p: float,
        dtype: torch.dtype,
        formula: Formula | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _forward(x, residual, weight, bias, seed, eps, dropout_p, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        x, residual, weight, bias, seed, _, ctx.dropout_p, _, ctx.formula = inputs
        _, s, mean, rstd = output
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(s, weight, bias, mean, rstd, seed)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        s, weight, bias, mean, rstd, seed = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        x_dtype, residual_dtype = ctx.dtypes
        rest = (None,) * 5
        if dy is None and ds is None:
            return *(None,) * 4, *rest
        if twice(ctx.formula):
            if seed is not None:
                raise RuntimeError(
                    "a second derivative of dropout_add_layer_norm with dropout needs backend 'reference'"
                )
            total, dw, db = ds, None, None
            if dy is not None:
                wanted = (needs_x or needs_residual, needs_weight, needs_bias)
                dnorm, dw, db = norm_gradients(ctx.formula, (s, weight, bias), wanted, dy)
                total = dnorm if ds is None or dnorm is None else dnorm + ds
            dx = total.to(x_dtype) if needs_x and total is not None else None
            dresidual = total.to(residual_dtype) if needs_residual and total is not None else None
            return dx, dresidual, dw, db, *rest
        # Without dropout both gradients are the same tensor.
        one = seed is None and x_dtype == residual_dtype
        dresidual, dx, dw, db = _backward(
            dy,
            ds,
            s,
            weight,
            mean,
            rstd,
            seed,
            ctx.dropout_p,
            residual_dtype if needs_residual or (one and needs_x) else None,
            x_dtype if needs_x and not one else None,
            *gradient_dtypes((needs_weight and dy is not None, needs_bias and dy is not None), weight, bias),
        )
        return (
            (dresidual if one else dx) if needs_x else None,
            dresidual if needs_residual else None,
            dw if needs_weight and dy is not None else None,
            db if needs_bias and dy is not None else None,
            *rest,
        )


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
    formula: Formula | None,
) -> tuple[Tensor, Tensor]:
    """Run `functional.dropout_add_layer_norm` with the kernels.

    Args:
        x, residual, weight, bias, eps, dropout_p: as in `functional.dropout_add_layer_norm`; shape: the normalised one.
        formula: layer norm in plain PyTorch, a function of s `[M, N]`, weight and bias `[N]`, for second derivatives.
    """
    seed = dropout_seed(x) if dropout_p > 0.0 else None
    dtype = output_dtype(x, residual)
    tensors = distinct(as_rows(x, shape), as_rows(residual, shape), as_row(weight), as_row(bias))
    y, s, _, _ = call(_DropoutAddLayerNorm, *tensors, seed, eps, dropout_p, dtype, formula)
    return (y, s) if y.shape == x.shape else (y.view(x.shape), s.view(x.shape))
