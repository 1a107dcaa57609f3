"""Layer norm: op, reference, registration and autograd Function, and the functions that all norms share.

Saved for backward, beside x and the weight: 1 / sqrt(var + eps) of each row, and the mean as the sum of two numbers, in
fp32: 12 bytes per row.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.choice import DTYPES, is_torchs, runs_fused
from fastformer.host.autograd_function import Formula, call, define, eager_formula, plain_gradients, twice
from fastformer.host.devices import check_tensors
from fastformer.modes import autocast_on_gpu_has

# Devices whose autocast runs a norm in float32. For RMS norm that depends on torch: not in 2.11, in 2.13.
IN_FLOAT32 = {op: {"cuda"} if autocast_on_gpu_has(op) else set() for op in ("layer_norm", "rms_norm")}


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply layer norm over the last dimensions (Ba et al. 2016), as `torch.nn.functional.layer_norm`.

    Args:
        x: `[..., *normalized_shape]`, floating point.
        normalized_shape: the trailing dimensions; a number stands for one.
        weight: `normalized_shape`, or None for ones. A narrower dtype than that of x is widened, where torch raises:
            FSDP2 gathers weights in 16 bits.
        bias: `normalized_shape`, or None for zeros; likewise.
        eps: added to the variance.
        dtype: of the result, which is rounded once; None: as in torch.

    Raises:
        fastformer.host.devices.DeviceError: a tensor is on another device than x, as in every op.
        TypeError: an argument is no tensor.
        RuntimeError: raised by torch, also for other mixtures of dtypes.
    """
    if dtype is None and is_torchs(x, weight, bias):
        return torch.layer_norm(x, as_shape(normalized_shape), weight, bias, eps)
    parameters = weight, bias
    check_tensors(("x", "weight", "bias"), x, (), parameters)
    shape = as_shape(normalized_shape)
    takes_kernel = runs_fused("layer_norm", x, lambda: norm_limit("layer_norm", *parameters))
    if not (takes_kernel and fits(x, shape, *parameters)):  # wrong shapes raise in torch
        y = F.layer_norm(x, shape, *as_wide(x, *parameters), eps)
        return y if dtype is None else y.to(dtype)
    plain: Any = partial(F.layer_norm, eps=eps)
    formula = eager_formula(lambda rows, *parameters: plain(rows, rows.shape[-1:], *parameters))
    y, _, _ = call(
        _LayerNorm, as_rows(x, shape), *as_row(*parameters), eps, dtype or output_dtype("layer_norm", x), formula
    )
    return y if y.shape == x.shape else y.view(x.shape)  # type: ignore[no-any-return]


def _forward_fake(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(shape, dtype=torch.float32) for shape in ((2, x.shape[0]), x.shape[:1]))
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


def _backward_fake(
    x: Tensor, dx: torch.dtype | None, dw: torch.dtype | None, db: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    return gradient(x, x.shape, dx), gradient(x, x.shape[1:], dw), gradient(x, x.shape[1:], db)


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
    """x `[M, N]`, weight, bias, eps, dtype, formula -> (y `[M, N]`, mean `[2, M]`, rstd `[M]`)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(*inputs[:-1])  # type: ignore[no-any-return]

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
        needs_grad = ctx.needs_input_grad[:3]
        if twice("layer_norm", ctx.formula):
            return *norm_gradients(ctx.formula, (x, weight, bias), needs_grad, dy), None, None, None
        gradients = _backward(dy, x, weight, mean, rstd, *gradient_dtypes(needs_grad, x, weight, bias))
        return *(grad if needed else None for grad, needed in zip(gradients, needs_grad, strict=True)), None, None, None


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return the normalised shape as a tuple."""
    if type(normalized_shape) is tuple:
        return normalized_shape
    # Under torch.jit.trace a size is a tensor without dimensions.
    one = isinstance(normalized_shape, int) or getattr(normalized_shape, "ndim", 1) == 0
    return (normalized_shape,) if one else tuple(normalized_shape)  # type: ignore[return-value, arg-type]


def fits(x: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Return whether x is `[..., *shape]` and the parameters have that shape."""
    for parameter in parameters:
        if parameter is not None and parameter.shape != shape:
            return False
    return shape != () and x.shape[-len(shape) :] == shape


def norm_limit(op: str, *tensors: Tensor | None) -> str | None:
    """Return why the kernels of a norm cannot take tensors beside x, or None; the dtypes may differ."""
    for x in tensors:
        if x is not None and x.dtype not in DTYPES:
            return f"{op} takes float32, float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    return None


def output_dtype(op: str, x: Tensor, *others: Tensor) -> torch.dtype:
    """Return the dtype of a norm of x, or of its sum with others: float32 where torch's autocast on a GPU does so.

    torch's autocast on a CPU does not change norms.
    """
    device = x.device.type
    if device in IN_FLOAT32[op] and torch.is_autocast_enabled(device):
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


def as_row(*parameters: Tensor | None) -> list[Tensor | None]:
    """View weights of the normalised shape as contiguous `[N]`."""
    return [x if x is None or (x.dim() == 1 and x.is_contiguous()) else x.reshape(-1).contiguous() for x in parameters]


def as_wide(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Widen parameters of a narrower dtype than x: kernels and FSDP2 need that, and torch raises."""
    dtype = x.dtype
    if (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype):
        return weight, bias  # saves 0.4 us

    def wide(parameter: Tensor | None) -> Tensor | None:
        if parameter is None or parameter.dtype == x.dtype:
            return parameter
        return parameter.to(x.dtype) if torch.promote_types(x.dtype, parameter.dtype) == x.dtype else parameter

    return wide(weight), wide(bias)


def gradient(like: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
    """Return an empty tensor of a shape and dtype; of 0 elements if dtype is None."""
    return like.new_empty(0 if dtype is None else shape, dtype=dtype)


def gradient_dtypes(needs_grad: tuple[bool, ...], *inputs: Tensor | None) -> list[torch.dtype | None]:
    """Return the dtype of each gradient that is needed, None for the others."""
    return [x.dtype if needed and x is not None else None for needed, x in zip(needs_grad, inputs, strict=True)]


def norm_gradients(
    formula: Formula, inputs: tuple[Tensor | None, ...], needs_grad: tuple[bool, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiate a norm's plain formula, in float32 where dtypes are mixed: torch's own kernels take one dtype."""

    def of_one_dtype(*mixed: Tensor | None) -> Any:
        same = len({x.dtype for x in mixed if x is not None}) == 1
        return formula(*mixed) if same else formula(*(None if x is None else x.float() for x in mixed))

    return plain_gradients(of_one_dtype, inputs, needs_grad, (dy,))
