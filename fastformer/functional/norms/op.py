"""Layer norm and RMS norm, alone or of residual + dropout(x): ops, checks and references.

Letters: M rows, N numbers of a row.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastformer.functional.choice import DTYPES, is_torchs, runs_fused
from fastformer.functional.dropout import drop
from fastformer.functional.norms.fused import NAMES, DropoutAddNorm, Norm
from fastformer.host.autograd_function import call, dropout_seed, eager_formula
from fastformer.host.devices import check_probability, check_tensors, check_types
from fastformer.modes import autocast_on_gpu_has

# Devices whose autocast runs a norm in float32. For RMS norm that depends on torch: not in 2.11, in 2.13.
IN_FLOAT32 = {op: {"cuda"} if autocast_on_gpu_has(op) else set() for op in NAMES.values()}


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

    Returns:
        Of the shape of x.

    Raises:
        fastformer.host.devices.DeviceError: a tensor is on another device than x, as in every op.
    """
    if dtype is None and is_torchs(x, weight, bias):
        return torch.layer_norm(x, _as_shape(normalized_shape), weight, bias, eps)
    return _norm(True, eps, x, None, normalized_shape, weight, bias, 0.0, dtype)[0]


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
        x, normalized_shape, weight, dtype: as in `layer_norm`.
        eps: added to the mean square; the machine epsilon if None, of fp32 for half precision too.
    """
    if dtype is None and is_torchs(x, weight):
        return torch.rms_norm(x, _as_shape(normalized_shape), weight, eps)
    return _norm(False, eps, x, None, normalized_shape, weight, None, 0.0, dtype)[0]


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
        normalized_shape, weight, bias, eps, dtype: as in `layer_norm`.
        dropout_p: applied to x whenever it is not 0.

    Returns:
        (norm(s), s). Pre-norm layers carry on with both, post-norm layers with the first.
    """
    if type(residual) is not Tensor:
        check_types(("residual",), residual)
    return _norm(True, eps, x, residual, normalized_shape, weight, bias, dropout_p, dtype)


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
    """Compute s = residual + dropout(x) and its RMS norm; arguments as in `dropout_add_layer_norm` and `rms_norm`."""
    if type(residual) is not Tensor:
        check_types(("residual",), residual)
    return _norm(False, eps, x, residual, normalized_shape, weight, None, dropout_p, dtype)


def _plain(
    centred: bool,
    eps: float | None,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute torch's layer norm if centred, else RMS norm."""
    return torch.layer_norm(x, shape, weight, bias, eps) if centred else torch.rms_norm(x, shape, weight, eps)  # type: ignore[arg-type]


def _norm(
    centred: bool,
    eps: float | None,
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    dropout_p: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Compute the norm of s, and s, for all four ops: s = residual + dropout(x), or x without a residual.

    centred: whether the norm is layer norm, which subtracts the mean; else RMS norm.
    """
    parameters = weight, bias
    shape = normalized_shape if isinstance(normalized_shape, tuple) else _as_shape(normalized_shape)
    op = NAMES[centred]
    if residual is not None:
        op = f"dropout_add_{op}"
        if dtype is None and is_torchs(x, weight, bias) and type(residual) is Tensor and residual.is_cpu:
            if x.shape == residual.shape and x.dtype is residual.dtype and 0.0 <= dropout_p <= 1.0:
                s = residual + (drop(x, dropout_p) if dropout_p else x)
                return _plain(centred, eps, s, shape, weight, bias), s
    check_tensors(("x", "weight", "bias", "residual"), x, (), (*parameters, residual))
    if residual is not None and x.shape != residual.shape:
        raise ValueError(f"x and residual must have the same shape, not {list(x.shape)} and {list(residual.shape)}")
    check_probability("dropout_p", dropout_p)
    takes_kernel = runs_fused(op, x, lambda: _limit(op, *parameters, residual))
    if not (takes_kernel and _fits(x, shape, *parameters)):  # wrong shapes raise in torch
        s = x if residual is None else residual + drop(x, dropout_p)
        y = _plain(centred, eps, s, shape, *_as_wide(s, *parameters))
        return (y if dtype is None else y.to(dtype)), s
    formula = eager_formula(lambda s, *parameters: _plain(centred, eps, s, s.shape[-1:], *parameters))
    added = torch.finfo(torch.float32).eps if eps is None else eps  # as in torch, for half precision too
    dtype = dtype or _output_dtype(NAMES[centred], x, residual)
    if residual is None:
        y, _, _ = call(Norm, _as_rows(x, shape), *_as_row(*parameters), added, dtype, centred, formula)
        return (y if y.shape == x.shape else y.view(x.shape)), x
    tensors = _as_rows(x, shape), _as_rows(residual, shape), *_as_row(*parameters)
    seed = dropout_seed(x) if dropout_p > 0.0 else None
    y, s, _, _ = call(DropoutAddNorm, *tensors, seed, added, dropout_p, centred, dtype, formula)
    return (y, s) if y.shape == x.shape else (y.view(x.shape), s.view(x.shape))


def _as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    if type(normalized_shape) is tuple:
        return normalized_shape
    # Under torch.jit.trace a size is a tensor without dimensions.
    one = isinstance(normalized_shape, int) or getattr(normalized_shape, "ndim", 1) == 0
    return (normalized_shape,) if one else tuple(normalized_shape)  # type: ignore[return-value, arg-type]


def _fits(x: Tensor, shape: tuple[int, ...], *parameters: Tensor | None) -> bool:
    """Return whether x is `[..., *shape]` and the parameters have that shape."""
    fit = all(parameter is None or parameter.shape == shape for parameter in parameters)
    return fit and shape != () and x.shape[-len(shape) :] == shape


def _limit(op: str, *tensors: Tensor | None) -> str | None:
    """Return why the kernels of a norm cannot take tensors beside x, or None; the dtypes may differ."""
    for x in tensors:
        if x is not None and x.dtype not in DTYPES:
            return f"{op} takes float32, float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    return None


def _output_dtype(op: str, x: Tensor, residual: Tensor | None) -> torch.dtype:
    """Return the dtype of a norm of x, or of its sum with a residual: float32 where torch's autocast on a GPU does so.

    torch's autocast on a CPU does not change norms.
    """
    device = x.device.type
    if device in IN_FLOAT32[op] and torch.is_autocast_enabled(device):
        return torch.float32
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _as_rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View `[..., *shape]` as `[M, N]`."""
    if len(shape) == 1 and x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[: x.dim() - len(shape)]), math.prod(shape))


def _as_row(*parameters: Tensor | None) -> list[Tensor | None]:
    """View parameters of the normalised shape as contiguous `[N]`."""
    return [x if x is None or (x.dim() == 1 and x.is_contiguous()) else x.reshape(-1).contiguous() for x in parameters]


def _as_wide(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Widen parameters of a narrower dtype than x: kernels and FSDP2 need that, and torch raises."""
    dtype = x.dtype
    return [
        p if p is None or p.dtype == dtype or torch.promote_types(dtype, p.dtype) != dtype else p.to(dtype)
        for p in parameters
    ]
