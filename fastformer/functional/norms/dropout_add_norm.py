"""s = residual + dropout(x) and its norm, the step between two sublayers: two ops, one registration, one Function.

Saved for backward, beside the weight: s, 1 / sqrt(var + eps) of each row in fp32 and the mean of a layer norm, and the
seed of the dropout mask; neither x nor the residual nor a mask.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.choice import is_torchs, runs_fused
from fastformer.functional.dropout import drop
from fastformer.functional.norms.layer_norm import (
    as_row,
    as_rows,
    as_shape,
    as_wide,
    fits,
    gradient,
    gradient_dtypes,
    norm_gradients,
    norm_limit,
    output_dtype,
)
from fastformer.functional.norms.rms_norm import epsilon
from fastformer.host.autograd_function import call, define, dropout_seed, eager_formula, twice
from fastformer.host.devices import check_probability, check_tensors

# Names by whether the norm is centred. Not a tuple: torch.compile (2.11) takes no bool as an index.
_OPS = {False: "dropout_add_rms_norm", True: "dropout_add_layer_norm"}


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute s = residual + dropout(x) and its layer norm, the step between two sublayers.

    Args:
        x: `[..., *normalized_shape]`, the output of a sublayer.
        residual: of x's shape.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        dropout_p: applied to x whenever it is not 0.
        dtype: of the norm, as in `layer_norm`.

    Returns:
        (norm(s), s). Pre-norm layers carry on with both, post-norm layers with the first.
    """
    plain = partial(F.layer_norm, eps=eps)
    return _step(True, plain, eps, x, residual, normalized_shape, weight, bias, dropout_p, dtype)


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute s = residual + dropout(x) and its RMS norm, the step between two sublayers.

    Args:
        x, residual, dropout_p: as in `dropout_add_layer_norm`.
        normalized_shape, weight, eps: as in `rms_norm`.
        dtype: of the norm, as in `rms_norm`.

    Returns:
        (norm(s), s). Pre-norm layers carry on with both, post-norm layers with the first.
    """

    def plain(s: Tensor, shape: tuple[int, ...], weight: Tensor | None, _: None) -> Tensor:
        return F.rms_norm(s, shape, weight, eps)

    return _step(False, plain, epsilon(eps), x, residual, normalized_shape, weight, None, dropout_p, dtype)


def _step(
    centred: bool,
    plain: Callable[..., Tensor],
    eps: float,
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Compute s and its norm, for both ops.

    Args:
        centred: the norm is layer norm, which subtracts the mean; else RMS norm.
        plain: torch's norm of a tensor, the normalised shape, weight and bias.
        eps: the number that the kernels add.
    """
    op, parameters = _OPS[centred], (weight, bias)
    if dtype is None and is_torchs(x, weight, bias) and type(residual) is Tensor and residual.is_cpu:
        if x.shape == residual.shape and x.dtype is residual.dtype and 0.0 <= dropout_p <= 1.0:
            s = residual + (drop(x, dropout_p) if dropout_p else x)
            shape = normalized_shape if isinstance(normalized_shape, tuple) else as_shape(normalized_shape)
            return plain(s, shape, weight, bias), s
    check_tensors(("x", "residual", "weight", "bias"), x, (residual,), parameters)
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have the same shape, not {list(x.shape)} and {list(residual.shape)}")
    check_probability("dropout_p", dropout_p)
    shape = as_shape(normalized_shape)
    takes_kernel = runs_fused(op, x, lambda: norm_limit(op, residual, *parameters))
    if not (takes_kernel and fits(x, shape, *parameters)):
        s = residual + drop(x, dropout_p)
        y = plain(s, shape, *as_wide(s, *parameters))
        return (y if dtype is None else y.to(dtype)), s
    formula = eager_formula(lambda s, *parameters: plain(s, s.shape[-1:], *parameters))
    tensors = as_rows(x, shape), as_rows(residual, shape), *as_row(*parameters)
    seed = dropout_seed(x) if dropout_p > 0.0 else None
    dtype = dtype or output_dtype(op.removeprefix("dropout_add_"), x, residual)
    y, s, _, _ = call(_DropoutAddNorm, *tensors, seed, eps, dropout_p, centred, dtype, formula)
    return (y, s) if y.shape == x.shape else (y.view(x.shape), s.view(x.shape))


def _forward_fake(
    x: Tensor, residual: Tensor, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    shapes = (2, x.shape[0]) if centred else (0,), x.shape[:1]
    mean, rstd = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return y, s, mean, rstd


def _backward_fake(
    s: Tensor, dresidual: torch.dtype | None, dx: torch.dtype | None, dw: torch.dtype | None, db: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = s.shape[1:]
    return gradient(s, s.shape, dresidual), gradient(s, s.shape, dx), gradient(s, row, dw), gradient(s, row, db)


_forward = define(
    "dropout_add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, "
    "float dropout_p, bool centred, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "norms.dropout_add_norm.forward",
    _forward_fake,
)
_backward = define(
    "dropout_add_norm_backward(Tensor? dy, Tensor? ds, Tensor s, Tensor? weight, Tensor? mean, Tensor rstd, "
    "Tensor? seed, float dropout_p, ScalarType? dresidual, ScalarType? dx, ScalarType? dw, ScalarType? db) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "norms.dropout_add_norm.backward",
    _backward_fake,
)


class _DropoutAddNorm(torch.autograd.Function):
    """x, residual `[M, N]`, weight, bias, seed, eps, dropout_p, centred, dtype, formula -> (y, s `[M, N]`, mean, rstd).

    mean and rstd are as in `layer_norm`; the mean is empty if the norm is not centred.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _forward(*inputs[:-1])  # type: ignore[no-any-return]

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
        if twice(_OPS[ctx.centred], ctx.formula, seed):
            total, dw, db = ds, None, None
            if dy is not None:
                needs_grad = (needs_x or needs_residual, needs_weight, needs_bias)
                dnorm, dw, db = norm_gradients(ctx.formula, (s, weight, bias), needs_grad, dy)
                total = dnorm if ds is None or dnorm is None else dnorm + ds
            dx = total.to(x_dtype) if needs_x and total is not None else None
            dresidual = total.to(residual_dtype) if needs_residual and total is not None else None
            return dx, dresidual, dw, db, *rest
        # Without dropout both gradients are the same tensor.
        same_gradient = seed is None and x_dtype == residual_dtype
        dresidual, dx, dw, db = _backward(
            *(dy, ds, s, weight, mean, rstd, seed, ctx.dropout_p),
            residual_dtype if needs_residual or (same_gradient and needs_x) else None,
            x_dtype if needs_x and not same_gradient else None,
            *gradient_dtypes((needs_weight and dy is not None, needs_bias and dy is not None), weight, bias),
        )
        return (
            (dresidual if same_gradient else dx) if needs_x else None,
            dresidual if needs_residual else None,
            dw if needs_weight and dy is not None else None,
            db if needs_bias and dy is not None else None,
            *rest,
        )
