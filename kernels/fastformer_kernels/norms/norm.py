"""Layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019), of x or of s = residual + dropout(x).

Layer norm is y = x̂ w + b with x̂ = (x - mean) / sqrt(var + eps) over rows of N elements; RMS norm is y = x̂ w with
x̂ = x / sqrt(mean(x^2) + eps). The gradients with g = dy w (means over the row, sums over the rows; mean(g) of layer
norm only):

    dx = (g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps),   dw = sum(dy x̂),   db = sum(dy)

Of s: dresidual = d norm(s) + ds, where ds may be missing, and dx = dropout'(dresidual).

Forward reads x once and writes y: 4 bytes an element in half precision; with a residual, 8. Backward reads dy and x
once and writes dx, 6 bytes: each program walks over many rows and keeps its sums of dw and db in registers; a second
kernel adds up the sums of all programs. With a residual it reads dy, s and ds, and computes the dropout mask again from
its seed. The variance is the mean of squared deviations, and the mean is stored as a sum of two numbers, for rows whose
mean is large (`rows.standardise`). Statistics are those of s in its stored dtype.

Rows that do not fit in one tile (`is_wide`) take two passes, and a backward pass of 10 bytes. Elementwise kernels then
compute s, and dropout's backward; the latter also runs alone if only ds is given.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer_kernels.host.launch import cdiv, guard, inner_contiguous, launch, recorded, threshold_and_scale
from fastformer_kernels.norms.long_rows import long_norm_forward_kernel, long_norm_gradient_means_kernel
from fastformer_kernels.norms.rows import new_partials, sum_partials
from fastformer_kernels.norms.short_rows import (
    dropout_add_backward_kernel,
    dropout_add_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
)
from fastformer_kernels.norms.tiles import (
    backward_tile,
    dropout_tile,
    elements_a_thread,
    elementwise,
    forward_tile,
    is_wide,
    row_strides,
    wide_tile,
)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in `dtype`, the rows' mean as the sum of two numbers, fp32 `[2, M]`, and 1 / sqrt(var + eps), `[M]`.

    Args:
        x: `[M, N]`.
        weight, bias: contiguous `[N]`, of any dtype.
        eps: added to the variance.
        dtype: of y.
    """
    y, _, mean, rstd = dropout_add_norm(x, None, weight, bias, None, eps, 0.0, True, dtype)
    return y, mean, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y in `dtype`, and the rows' 1 / sqrt(mean(x^2) + eps), fp32 `[M]`; arguments as in `layer_norm`."""
    y, _, _, rstd = dropout_add_norm(x, None, weight, None, None, eps, 0.0, False, dtype)
    return y, rstd


def dropout_add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Any, Any, Tensor]:
    """Return y in `dtype`, s, and the statistics of the rows of s as its norm returns them; RMS norm: an empty mean.

    Args:
        x, residual: `[M, N]`; s has the dtype to which both promote. Without a residual s is x, and None is returned
            for s and for the mean of RMS norm.
        weight, bias, eps, dtype: as in `layer_norm`.
        seed: of dropout, int64 `[1]`; None: no dropout.
        dropout_p: the probability to drop.
        centred: the norm is layer norm; else RMS norm, which has no bias.
    """
    M, N = x.shape
    x, s, mean = inner_contiguous(x), None, None
    if residual is not None:
        residual = inner_contiguous(residual)
        s = recorded(x.new_empty((M, N), dtype=torch.promote_types(x.dtype, residual.dtype)))
    y = recorded(x.new_empty((M, N), dtype=dtype))
    if centred or residual is not None:
        mean = recorded(x.new_empty((2, M) if centred else 0, dtype=torch.float32))
    rstd = recorded(x.new_empty(M, dtype=torch.float32))
    if x.numel() == 0:
        return y, s, mean, rstd
    written_mean = mean if centred else None
    align, strides = row_strides(x, residual)
    dropout = threshold_and_scale(dropout_p)
    with guard(x):
        if not is_wide(N):
            tile = forward_tile(N) if residual is None else dropout_tile(N)
            tensors = (x, residual, weight, bias, seed, y, s, written_mean, rstd)
            sizes = (*strides, M, *dropout, eps, N, align)
            launch(norm_forward_kernel, (cdiv(M, tile["BLOCK_M"]),), *tensors, *sizes, **tile)
            return y, s, mean, rstd
        if s is not None:
            grid, tile = elementwise(x)
            launch(dropout_add_kernel, grid, x, residual, seed, s, *strides, M, *dropout, N, align, **tile)
            x, (align, strides) = s, row_strides(s)
        row_tensors = (x, weight, bias, y, written_mean, rstd)
        launch(long_norm_forward_kernel, (M,), *row_tensors, strides[0], N, eps, align, **wide_tile())
    return y, s, mean, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: torch.dtype | None,
    dw: torch.dtype | None,
    db: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias in the dtypes dx, dw, db; of 0 elements if the dtype is None.

    Args:
        dy: `[M, N]`, the gradient of y.
        x, weight: as in forward; mean, rstd: its results. Without a mean the norm is RMS norm.
        dx, dw, db: dtypes of the gradients, None to skip one.
    """
    dy, x = inner_contiguous(dy), inner_contiguous(x)
    M, N = x.shape
    x_grad = recorded(x.new_empty(0 if dx is None else (M, N), dtype=dx))
    if x.numel() == 0:
        return x_grad, *(x.new_zeros(0 if dtype is None else N, dtype=dtype) for dtype in (dw, db))
    grid, tile = backward_tile(x, dy.element_size() + x.element_size())
    partials = new_partials(x, grid[0], dw, db)
    align, (stride_dy, stride_x) = row_strides(dy, x)
    with guard(x):
        means = None
        if is_wide(N) and dx is not None:
            means = recorded(x.new_empty((1 if mean is None else 2, M), dtype=torch.float32))
            tensors = (dy, x, weight, mean, rstd, means)
            launch(long_norm_gradient_means_kernel, (M,), *tensors, stride_dy, stride_x, N, align, **wide_tile())
        written = (None if dx is None else x_grad, None, *partials)
        sizes = (stride_dy, 0, stride_x, M, *threshold_and_scale(0.0), N, align)
        launch(norm_backward_kernel, grid, dy, None, x, weight, mean, rstd, means, None, *written, *sizes, **tile)
        return x_grad, *sum_partials(x, partials, dw, db)


def dropout_add_norm_backward(
    dy: Tensor | None,
    ds: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    dresidual: torch.dtype | None,
    dx: torch.dtype | None,
    dw: torch.dtype | None,
    db: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of residual, x, weight and bias in these dtypes; of 0 elements if the dtype is None.

    Args:
        dy, ds: `[M, N]`, the gradients of y and s; one of them may be None.
        s, mean, rstd: results of forward, mean None of RMS norm; weight, seed, dropout_p: as there.
        dresidual, dx, dw, db: dtypes of the gradients, None to skip one; dw and db only with dy.
    """
    M, N = s.shape
    residual_grad, x_grad = (recorded(s.new_empty((M, N) if dtype else 0, dtype=dtype)) for dtype in (dresidual, dx))
    if s.numel() == 0:
        return residual_grad, x_grad, *(s.new_zeros(0 if dtype is None else N, dtype=dtype) for dtype in (dw, db))
    dy, ds = (None if grad is None else inner_contiguous(grad) for grad in (dy, ds))
    written = (None if dresidual is None else residual_grad, None if dx is None else x_grad)
    ds_bytes = 0 if ds is None else ds.element_size()
    dropout = threshold_and_scale(dropout_p)
    elements = elements_a_thread(N, any(dtype not in (None, s.dtype) for dtype in (dresidual, dx)))
    if dy is not None and elements is not None:
        grid, tile = backward_tile(s, dy.element_size() + s.element_size() + ds_bytes, elements)
        partials = new_partials(s, grid[0], dw, db)
        tensors = (dy, ds, s, weight, mean, rstd, None, seed, *written, *partials)
        align, strides = row_strides(dy, ds, s)
        sizes = (M, *dropout, N, align)
        with guard(s):
            launch(norm_backward_kernel, (grid[0],), *tensors, *strides, *sizes, **tile)
            return residual_grad, x_grad, *sum_partials(s, partials, dw, db)
    dnorm, w_grad, b_grad = None, recorded(s.new_empty(0)), recorded(s.new_empty(0))
    if dy is not None:
        dnorm_dtype = None if written == (None, None) else torch.float32
        dnorm, w_grad, b_grad = norm_backward(dy, s, weight, mean, rstd, dnorm_dtype, dw, db)
    if written != (None, None):
        grid, tile = elementwise(s)
        align, (_, stride_ds_m) = row_strides(s, ds)
        sizes = (M, *dropout, N, align)
        with guard(s):
            launch(dropout_add_backward_kernel, grid, dnorm, ds, seed, *written, stride_ds_m, *sizes, **tile)
    return residual_grad, x_grad, w_grad, b_grad
