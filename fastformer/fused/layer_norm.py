"""The fused layer norm, and what the other norms share with it.

Kept for backward, beside x and the weight: mean and 1 / sqrt(var + eps) of each row in fp32, 8 bytes a row.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fastformer.autograd_function import call
from fastformer.fused import DTYPES
from fastformer.fused.differentiation import Formula, distinct, plain_gradients, twice
from fastformer.fused.registration import define


def norm_limit(op: str, x: Tensor, *others: Tensor | None) -> str | None:
    """Return why the kernels of a norm cannot take these tensors beside x, or None; their dtypes may differ."""
    for other in others:
        if other is not None and other.dtype not in DTYPES:
            return f"{op} takes float32, float16 and bfloat16, not {str(other.dtype).removeprefix('torch.')}"
    return None


def output_dtype(x: Tensor, *others: Tensor) -> torch.dtype:
    """Return the dtype of a norm of x, or of its sum with others: float32 under autocast on a GPU, as in torch.

    Autocast on a CPU leaves norms alone in torch.
    """
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.float32
    dtype = x.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def as_rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View `[..., *shape]` as `[M, N]`."""
    if len(shape) == 1 and x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[: x.dim() - len(shape)]), math.prod(shape))


def as_row(parameter: Tensor | None) -> Tensor | None:
    """View a weight of the normalised shape as contiguous `[N]`."""
    if parameter is None or (parameter.dim() == 1 and parameter.is_contiguous()):
        return parameter
    return parameter.reshape(-1).contiguous()


def gradient_dtypes(wanted: tuple[bool, ...], *inputs: Tensor | None) -> list[torch.dtype | None]:
    """Return the dtype of each gradient that is wanted, None for others."""
    return [x.dtype if needed and x is not None else None for needed, x in zip(wanted, inputs, strict=True)]


def norm_gradients(
    formula: Formula, inputs: tuple[Tensor | None, ...], wanted: tuple[bool, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate a norm's plain formula, in float32 where dtypes are mixed: torch's own kernels take one dtype."""

    def of_one_dtype(*mixed: Tensor | None) -> Any:
        same = len({x.dtype for x in mixed if x is not None}) == 1
        return formula(*mixed) if same else formula(*(None if x is None else x.float() for x in mixed))

    return plain_gradients(of_one_dtype, inputs, wanted, (dy,))


def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    return y, x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: torch.dtype | None,
    dw: torch.dtype | None,
    db: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    w_grad, b_grad = (x.new_empty(0 if dtype is None else x.shape[1], dtype=dtype) for dtype in (dw, db))
    return x.new_empty(0 if dx is None else x.shape, dtype=dx), w_grad, b_grad


_forward = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    "norms.layer_norm.forward",
    _forward_fake,
)
_backward = define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "ScalarType? dx, ScalarType? dw, ScalarType? db) -> (Tensor, Tensor, Tensor)",
    "norms.layer_norm.backward",
    _backward_fake,
)


class _LayerNorm(torch.autograd.Function):
    """x `[M, N]` -> (y `[M, N]`, mean `[M]`, rstd `[M]`)."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        formula: Formula | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(x, weight, bias, eps, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, _, _, ctx.formula = inputs
        _, mean, rstd = output
        ctx.save_for_backward(*tensors, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 6
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if twice(ctx.formula):
            return *norm_gradients(ctx.formula, (x, weight, bias), wanted, dy), None, None, None
        found = _backward(dy, x, weight, mean, rstd, *gradient_dtypes(wanted, x, weight, bias))
        return *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)), None, None, None


def layer_norm(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    formula: Formula | None,
) -> Tensor:
    """Run `functional.layer_norm` with the kernels.

    Args:
        x, weight, bias, eps: as in `functional.layer_norm`; shape: the normalised one, as a tuple.
        formula: the op in plain PyTorch, a function of x `[M, N]`, weight and bias `[N]`, for second derivatives.
    """
    rows = as_rows(x, shape)
    tensors = distinct(rows, as_row(weight), as_row(bias))
    y, _, _ = call(_LayerNorm, *tensors, eps, output_dtype(x), formula)
    return y if y.shape == x.shape else y.view(x.shape)  # type: ignore[no-any-return]
