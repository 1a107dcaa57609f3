"""RMS norm: the op, its reference, its registration and its autograd Function.

Saved for backward, beside x and the weight: 1 / sqrt(mean(x^2) + eps) of each row in fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.choice import is_torchs, runs_fused
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
from fastformer.host.autograd_function import call, define, eager_formula, twice
from fastformer.host.devices import check_tensors


def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply RMS norm over the last dimensions (Zhang and Sennrich 2019), as `torch.nn.functional.rms_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones; may have a narrower dtype than x.
        eps: added to the mean square; the machine epsilon if None, of fp32 for half precision too.
        dtype: of the result, which is rounded once; None: as in torch.
    """
    if dtype is None and is_torchs(x, weight):
        return torch.rms_norm(x, as_shape(normalized_shape), weight, eps)
    check_tensors(("x", "weight"), x, (), (weight,))
    shape = as_shape(normalized_shape)
    if not (runs_fused("rms_norm", x, lambda: norm_limit("rms_norm", weight)) and fits(x, shape, weight)):
        y = F.rms_norm(x, shape, as_wide(x, weight, None)[0], eps)
        return y if dtype is None else y.to(dtype)
    formula = eager_formula(lambda rows, weight: F.rms_norm(rows, rows.shape[-1:], weight, eps))
    y, _ = call(
        _RMSNorm, as_rows(x, shape), *as_row(weight), epsilon(eps), dtype or output_dtype("rms_norm", x), formula
    )
    return y.view(x.shape)  # type: ignore[no-any-return]


def epsilon(eps: float | None) -> float:
    """Return the number that kernels add; None is fp32's machine epsilon, for half precision too, as in torch."""
    return torch.finfo(torch.float32).eps if eps is None else eps


def _forward_fake(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


def _backward_fake(x: Tensor, dx: torch.dtype | None, dw: torch.dtype | None) -> tuple[Tensor, Tensor]:
    return gradient(x, x.shape, dx), gradient(x, x.shape[1:], dw)


_forward = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    "norms.rms_norm.forward",
    _forward_fake,
)
_backward = define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, ScalarType? dx, ScalarType? dw) "
    "-> (Tensor, Tensor)",
    "norms.rms_norm.backward",
    _backward_fake,
)


class _RMSNorm(torch.autograd.Function):
    """x `[M, N]`, weight, eps, dtype, formula -> (y `[M, N]`, rstd `[M]`)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return _forward(*inputs[:-1])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, _, ctx.formula = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, weight, rstd = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:2]
        if twice("rms_norm", ctx.formula):
            return *norm_gradients(ctx.formula, (x, weight), needs_grad, dy), None, None, None
        gradients = _backward(dy, x, weight, rstd, *gradient_dtypes(needs_grad, x, weight))
        return *(grad if needed else None for grad, needed in zip(gradients, needs_grad, strict=True)), None, None, None
