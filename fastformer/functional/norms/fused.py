"""Fused norms: registration of their kernels, and the autograd Functions.

Saved for backward, beside the weight and the normalised tensor: 1 / sqrt(variance + eps) of each row in fp32; of a
layer norm the mean, as the sum of two numbers in fp32; and the seed of the dropout mask. Neither the residual nor a
mask is saved.

Letters: M rows, N numbers of a row.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer.host.autograd_function import Formula, define, needs_double_backward, plain_gradients

# Names by whether the norm is centred. Not a tuple: torch.compile (2.11) takes no bool as an index.
NAMES = {False: "rms_norm", True: "layer_norm"}


def _empty(like: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
    """Return an empty gradient; of 0 elements if dtype is None."""
    return like.new_empty(0 if dtype is None else shape, dtype=dtype)


def _forward_fake(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(shape, dtype=torch.float32) for shape in ((2, x.shape[0]), x.shape[:1]))
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


def _backward_fake(
    x: Tensor, dx: torch.dtype | None, dw: torch.dtype | None, db: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, x.shape, dx), _empty(x, x.shape[1:], dw), _empty(x, x.shape[1:], db)


def _step_forward_fake(
    x: Tensor, residual: Tensor, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = _forward_fake(x, dtype)
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return y, s, mean if centred else x.new_empty(0, dtype=torch.float32), rstd


def _step_backward_fake(
    s: Tensor, dresidual: torch.dtype | None, dx: torch.dtype | None, dw: torch.dtype | None, db: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(s, s.shape, dresidual), *_backward_fake(s, dx, dw, db)


_layer_norm = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    "norms.norm.layer_norm",
    _forward_fake,
)
_norm_backward = define(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, "
    "ScalarType? dx, ScalarType? dw, ScalarType? db) -> (Tensor, Tensor, Tensor)",
    "norms.norm.norm_backward",
    _backward_fake,
)
_rms_norm = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    "norms.norm.rms_norm",
    lambda x, dtype: _forward_fake(x, dtype)[::2],
)
_dropout_add_norm = define(
    "dropout_add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, "
    "float dropout_p, bool centred, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "norms.norm.dropout_add_norm",
    _step_forward_fake,
)
_dropout_add_norm_backward = define(
    "dropout_add_norm_backward(Tensor? dy, Tensor? ds, Tensor s, Tensor? weight, Tensor? mean, Tensor rstd, "
    "Tensor? seed, float dropout_p, ScalarType? dresidual, ScalarType? dx, ScalarType? dw, ScalarType? db) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "norms.norm.dropout_add_norm_backward",
    _step_backward_fake,
)


def _dtypes(needs_grad: tuple[bool, ...], *inputs: Tensor | None) -> list[torch.dtype | None]:
    """Return the dtype of each gradient that is needed, None for the others."""
    return [x.dtype if needed and x is not None else None for needed, x in zip(needs_grad, inputs, strict=True)]


def _differentiable_gradients(
    formula: Formula, inputs: tuple[Tensor | None, ...], needs_grad: tuple[bool, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate a norm's plain formula, in float32 where dtypes are mixed: torch's own kernels take one dtype."""

    def of_one_dtype(*mixed: Tensor | None) -> Any:
        same = len({x.dtype for x in mixed if x is not None}) == 1
        return formula(*mixed) if same else formula(*(None if x is None else x.float() for x in mixed))

    return plain_gradients(of_one_dtype, inputs, needs_grad, (dy,))


def add_norm_kernel(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float | None, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual `[M, N]`, and the sum, without gradients; nothing is checked.

    All tensors are on one device, and of one dtype, but for x or the residual; eps: None is that of fp32.
    """
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    if residual is not None:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        y, s, _, _ = _dropout_add_norm(x, residual, weight, bias, None, eps, 0.0, centred, dtype)
        return y, s
    return (_layer_norm(x, weight, bias, eps, x.dtype) if centred else _rms_norm(x, weight, eps, x.dtype))[0], x


class Norm(torch.autograd.Function):
    """x `[M, N]`, weight, bias, eps, dtype, centred, formula -> (y `[M, N]`, mean `[2, M]` or None, rstd `[M]`)."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype, centred: bool, _: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if centred:
            return _layer_norm(x, weight, bias, eps, dtype)  # type: ignore[no-any-return]
        y, rstd = _rms_norm(x, weight, eps, dtype)
        return y, None, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor]) -> None:
        *tensors, _, _, ctx.centred, ctx.formula = inputs
        _, mean, rstd = output
        ctx.save_for_backward(*tensors, mean, rstd)
        ctx.mark_non_differentiable(*(x for x in (mean, rstd) if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        rest = (None,) * 4
        if dy is None:
            return *(None,) * 3, *rest
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:3]
        if needs_double_backward(NAMES[ctx.centred], ctx.formula):
            return *_differentiable_gradients(ctx.formula, (x, weight, bias), needs_grad, dy), *rest
        gradients = _norm_backward(dy, x, weight, mean, rstd, *_dtypes(needs_grad, x, weight, bias))
        return *(grad if needed else None for grad, needed in zip(gradients, needs_grad, strict=True)), *rest


class DropoutAddNorm(torch.autograd.Function):
    """x, residual `[M, N]`, weight, bias, seed, eps, dropout_p, centred, dtype, formula -> (y, s `[M, N]`, mean, rstd).

    mean and rstd are as in `Norm`; the mean is empty if the norm is not centred.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _dropout_add_norm(*inputs[:-1])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        x, residual, weight, bias, seed, _, ctx.dropout_p, ctx.centred, _, ctx.formula = inputs
        _, s, mean, rstd = output
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(s, weight, bias, mean if ctx.centred else None, rstd, seed)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        s, weight, bias, mean, rstd, seed = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        x_dtype, residual_dtype = ctx.dtypes
        rest = (None,) * 6
        if dy is None and ds is None:
            return *(None,) * 4, *rest
        needs_weight, needs_bias = needs_weight and dy is not None, needs_bias and dy is not None
        if needs_double_backward(f"dropout_add_{NAMES[ctx.centred]}", ctx.formula, seed):
            total, dw, db = ds, None, None
            if dy is not None:
                needs_s = needs_x or needs_residual
                needed = needs_s, needs_weight, needs_bias
                dnorm, dw, db = _differentiable_gradients(ctx.formula, (s, weight, bias), needed, dy)
                total = dnorm if ds is None or dnorm is None else dnorm + ds
            dx = total.to(x_dtype) if needs_x and total is not None else None
            dresidual = total.to(residual_dtype) if needs_residual and total is not None else None
            return dx, dresidual, dw, db, *rest
        # Without dropout both gradients are the same tensor.
        same_gradient = seed is None and x_dtype == residual_dtype
        dresidual, dx, dw, db = _dropout_add_norm_backward(
            *(dy, ds, s, weight, mean, rstd, seed, ctx.dropout_p),
            residual_dtype if needs_residual or (same_gradient and needs_x) else None,
            x_dtype if needs_x and not same_gradient else None,
            *_dtypes((needs_weight, needs_bias), weight, bias),
        )
        gradients = dresidual if same_gradient else dx, dresidual, dw, db
        needs_grad = needs_x, needs_residual, needs_weight, needs_bias
        return *(grad if needed else None for grad, needed in zip(gradients, needs_grad, strict=True)), *rest
