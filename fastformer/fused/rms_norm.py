"""The fused RMS norm. Kept for backward, beside x and the weight: 1 / sqrt(mean(x^2) + eps) of each row in fp32."""

from typing import Any

import torch
from torch import Tensor

from fastformer.autograd_function import call
from fastformer.fused.differentiation import Formula, distinct, twice
from fastformer.fused.layer_norm import as_row, as_rows, gradient_dtypes, norm_gradients, output_dtype
from fastformer.fused.registration import define


def _forward_fake(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dx: torch.dtype | None, dw: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(0 if dx is None else x.shape, dtype=dx), x.new_empty(0 if dw is None else x.shape[1], dtype=dw)


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
    """x `[M, N]` -> (y `[M, N]`, rstd `[M]`)."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype, formula: Formula | None
    ) -> tuple[Tensor, Tensor]:
        return _forward(x, weight, eps, dtype)  # type: ignore[no-any-return]

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
        wanted = ctx.needs_input_grad[:2]
        if twice(ctx.formula):
            return *norm_gradients(ctx.formula, (x, weight), wanted, dy), None, None, None
        found = _backward(dy, x, weight, rstd, *gradient_dtypes(wanted, x, weight))
        return *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)), None, None, None


def rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None, *, formula: Formula | None
) -> Tensor:
    """Run `functional.rms_norm` with the kernels.

    Args:
        x, weight, eps: as in `functional.rms_norm`; shape: the normalised one, as a tuple.
        formula: the op in plain PyTorch, a function of x `[M, N]` and weight `[N]`, for second derivatives.
    """
    # Half precision is normalised in fp32, and torch takes the machine epsilon of that.
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    y, _ = call(_RMSNorm, *distinct(as_rows(x, shape), as_row(weight)), eps, output_dtype(x), formula)
    return y.view(x.shape)  # type: ignore[no-any-return]
