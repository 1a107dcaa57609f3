"""Layer normalisation (Ba et al. 2016), y = x̂ w + b with x̂ = (x - mean) / sqrt(var + eps) over rows of N elements.

The gradient with g = dy w (means over the row, sums over the rows):

    dx = (g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps),   dw = sum(dy x̂),   db = sum(dy)

Forward reads x once and writes y: 4 bytes an element in half precision. Backward reads dy and x once and writes dx, 6
bytes: its programs stay and walk over the rows, keep the sums of dw and db in registers, and leave one row each for a
second kernel to add up. The variance is the mean of squared deviations, for rows whose mean is large. Rows longer than
`norm.is_wide` allows take two passes, and a backward pass of 10 bytes.
"""

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.launch import cdiv, guard, inner_contiguous, kernel, launch, noted
from fastformer_kernels.norm import (
    backward_tile,
    forward_tile,
    is_wide,
    load_row,
    load_standardised,
    load_tile,
    new_partials,
    row_strides,
    scale_and_shift,
    standardise,
    standardise_gradient,
    store_partials,
    sum_partials,
    two_sums,
    wide_tile,
)


@kernel()
def layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    M,
    eps,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Normalise BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts = rows.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    x = load_tile(x_ptr, starts, x_stride, cols, mask, ALIGN)
    normal, mean, rstd = standardise(x, cols, eps, N)
    y = scale_and_shift(normal, weight_ptr, bias_ptr, cols, N, BLOCK_M)
    tl.store(y_ptr + starts * N + cols, y, mask)
    tl.store(mean_ptr + rows, mean, rows < M)
    tl.store(rstd_ptr + rows, rstd, rows < M)


@kernel("N")
def layer_norm_wide_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    N,
    eps,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Normalise one long row: a pass for the statistics, a pass for y.

    Every column of the tile keeps the mean and the squared deviations of what it has met (Welford 1962); at the end
    those of the columns are combined (Chan et al. 1979).
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)[None, :]
    means = tl.zeros((1, BLOCK_N), tl.float32)
    squares = tl.zeros((1, BLOCK_N), tl.float32)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + lanes
        x = load_tile(x_ptr, row, x_stride, cols, cols < N, ALIGN)
        change = tl.where(cols < N, x - means, 0.0)
        means += change * (1.0 / (first // BLOCK_N + 1))
        squares += change * (x - means)
    counts = ((N - 1 - lanes) // BLOCK_N + 1).to(tl.float32)
    mean = tl.sum(means * counts) / N
    rstd = tl.rsqrt(tl.sum(squares + counts * (means - mean) * (means - mean)) / N + eps)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + lanes
        x = load_tile(x_ptr, row, x_stride, cols, cols < N, ALIGN)
        y = scale_and_shift((x - mean) * rstd, weight_ptr, bias_ptr, cols, N, 1)
        tl.store(y_ptr + row * N + cols, y, cols < N)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@kernel("N")
def layer_norm_gradient_means_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    dy_stride,
    x_stride,
    N,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write mean(g x̂) and mean(g) of one long row to `[2, M]`: the first pass of its backward."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    sum_gx = tl.zeros((1, BLOCK_N), tl.float32)
    sum_g = tl.zeros((1, BLOCK_N), tl.float32)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        g = load_tile(dy_ptr, row, dy_stride, cols, cols < N, ALIGN)
        x = load_tile(x_ptr, row, x_stride, cols, cols < N, ALIGN)
        if weight_ptr is not None:
            g *= load_row(weight_ptr, cols, N, 1)
        sum_gx += g * (x - mean) * rstd
        sum_g += g
    tl.store(means_ptr + row, tl.sum(sum_gx) / N)
    tl.store(means_ptr + tl.num_programs(0) + row, tl.sum(sum_g) / N)


@kernel()
def layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    dy_stride,
    x_stride,
    M,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dx, and this program's share of dw and db (each may be None), tile by tile of BLOCK_M rows.

    A tile holds whole rows, or the columns of program 1 of long ones, whose means are then given.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    if N > BLOCK_N:
        cols += tl.program_id(1) * BLOCK_N
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_ptr is not None:
        weight = load_row(weight_ptr, cols, N, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        starts = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & (cols < N)
        dy = load_tile(dy_ptr, starts, dy_stride, cols, mask, ALIGN)
        normal, rstd = load_standardised(x_ptr, mean_ptr, rstd_ptr, rows, starts, x_stride, cols, mask, M, ALIGN)
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        if means_ptr is None:
            mean_gx, mean_g = two_sums(g * normal, g)
            mean_gx, mean_g = mean_gx / N, mean_g / N
        else:
            mean_gx = tl.load(means_ptr + rows, rows < M, other=0.0)
            mean_g = tl.load(means_ptr + M + rows, rows < M, other=0.0)
        if dx_ptr is not None:
            dx = standardise_gradient(g, normal, mean_gx, mean_g, rstd)
            tl.store(dx_ptr + starts * N + cols, dx, mask)
        dw += dy * normal
        db += dy
    store_partials(dw_ptr, db_ptr, dw, db, cols, N)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in `dtype`, and the rows' mean and 1 / sqrt(var + eps), fp32 `[M]`.

    Args:
        x: `[M, N]`.
        weight, bias: contiguous `[N]`, of any dtype.
        eps: added to the variance.
        dtype: of y.
    """
    x = inner_contiguous(x)
    M, N = x.shape
    y = noted(x.new_empty((M, N), dtype=dtype))
    mean, rstd = (noted(x.new_empty(M, dtype=torch.float32)) for _ in range(2))
    if x.numel() == 0:
        return y, mean, rstd
    tensors = (x, weight, bias, y, mean, rstd)
    align, strides = row_strides(x)
    with guard(x):
        if is_wide(N):
            launch(layer_norm_wide_forward_kernel, (M,), *tensors, *strides, N, eps, align, **wide_tile())
        else:
            tile = forward_tile(N)
            launch(layer_norm_forward_kernel, (cdiv(M, tile["BLOCK_M"]),), *tensors, *strides, M, eps, N, align, **tile)
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dx: torch.dtype | None,
    dw: torch.dtype | None,
    db: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias in the dtypes dx, dw, db; of 0 elements where that is None.

    Args:
        dy: `[M, N]`, the gradient of y.
        x, weight: as in `forward`; mean, rstd: its results.
        dx, dw, db: dtypes of the gradients that are wanted.
    """
    dy, x = inner_contiguous(dy), inner_contiguous(x)
    M, N = x.shape
    x_grad = noted(x.new_empty(0 if dx is None else (M, N), dtype=dx))
    if x.numel() == 0:
        return x_grad, *(x.new_zeros(0 if dtype is None else N, dtype=dtype) for dtype in (dw, db))
    grid, tile = backward_tile(x, dy.element_size() + x.element_size())
    partials = new_partials(x, grid[0], dw, db)
    align, strides = row_strides(dy, x)
    with guard(x):
        means = None
        if is_wide(N) and dx is not None:
            means = gradient_means(dy, x, weight, mean, rstd)
        tensors = (dy, x, weight, mean, rstd, means, None if dx is None else x_grad, *partials)
        launch(layer_norm_backward_kernel, grid, *tensors, *strides, M, N, align, **tile)
        return x_grad, *sum_partials(x, partials, dw, db)


def gradient_means(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return mean(g x̂) and mean(g) of long rows, fp32 `[2, M]`."""
    M, N = x.shape
    means = noted(x.new_empty((2, M), dtype=torch.float32))
    tensors = (dy, x, weight, mean, rstd, means)
    align, strides = row_strides(dy, x)
    launch(layer_norm_gradient_means_kernel, (M,), *tensors, *strides, N, align, **wide_tile())
    return means
