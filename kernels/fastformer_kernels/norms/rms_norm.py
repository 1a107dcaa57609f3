"""Root-mean-square normalisation (Zhang and Sennrich 2019), y = x̂ w with x̂ = x / sqrt(mean(x^2) + eps).

The gradient with g = dy w (means over the row, sums over the rows):

    dx = (g - x̂ mean(g x̂)) / sqrt(mean(x^2) + eps),   dw = sum(dy x̂)

Passes and tiles are those of `layer_norm`.
"""

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.host.launch import cdiv, guard, inner_contiguous, kernel, launch, noted
from fastformer_kernels.norms.layer_norm import backward_tile, forward_tile, is_wide, row_strides, wide_tile
from fastformer_kernels.norms.long_rows import rms_norm_gradient_mean_kernel, rms_norm_wide_forward_kernel
from fastformer_kernels.norms.rows import (
    divide_by_root_mean_square,
    divide_gradient,
    load_row,
    load_standardised,
    load_tile,
    new_partials,
    scale_and_shift,
    store_partials,
    sum_partials,
)


@kernel()
def rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    stride_x_m,
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
    x = load_tile(x_ptr, starts, stride_x_m, cols, mask, ALIGN)
    normal, rstd = divide_by_root_mean_square(x, eps, N)
    y = scale_and_shift(normal, weight_ptr, None, cols, N, BLOCK_M)
    tl.store(y_ptr + starts * N + cols, y, mask)
    tl.store(rstd_ptr + rows, rstd, rows < M)


@kernel()
def rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    mean_ptr,
    dx_ptr,
    dw_ptr,
    stride_dy_m,
    stride_x_m,
    M,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dx, and this program's share of dw (each may be None), tile by tile of BLOCK_M rows.

    A tile holds whole rows, or the columns of program 1 of wide ones, whose mean(g x̂) is then given.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    if N > BLOCK_N:
        cols += tl.program_id(1) * BLOCK_N
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_ptr is not None:
        weight = load_row(weight_ptr, cols, N, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        starts = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & (cols < N)
        dy = load_tile(dy_ptr, starts, stride_dy_m, cols, mask, ALIGN)
        normal, rstd = load_standardised(x_ptr, None, rstd_ptr, rows, starts, stride_x_m, cols, mask, M, ALIGN)
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        if mean_ptr is None:
            mean = tl.sum(g * normal, 1) / N
        else:
            mean = tl.load(mean_ptr + rows, rows < M, other=0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + starts * N + cols, divide_gradient(g, normal, mean, rstd), mask)
        dw += dy * normal
    store_partials(dw_ptr, None, dw, None, cols, N, dy_ptr.dtype.element_ty)


def forward(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y in `dtype`, and the rows' 1 / sqrt(mean(x^2) + eps), fp32 `[M]`.

    Args:
        x: `[M, N]`.
        weight: contiguous `[N]`, of any dtype.
        eps: added to the mean square.
        dtype: of y.
    """
    x = inner_contiguous(x)
    M, N = x.shape
    y, rstd = noted(x.new_empty((M, N), dtype=dtype)), noted(x.new_empty(M, dtype=torch.float32))
    if x.numel() == 0:
        return y, rstd
    tensors = (x, weight, y, rstd)
    align, strides = row_strides(x)
    with guard(x):
        if is_wide(N):
            launch(rms_norm_wide_forward_kernel, (M,), *tensors, *strides, N, eps, align, **wide_tile())
        else:
            tile = forward_tile(N)
            launch(rms_norm_forward_kernel, (cdiv(M, tile["BLOCK_M"]),), *tensors, *strides, M, eps, N, align, **tile)
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dx: torch.dtype | None, dw: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight in the dtypes dx and dw; of 0 elements if the dtype is None.

    Args:
        dy: `[M, N]`, the gradient of y.
        x, weight: as in `forward`; rstd: its result.
        dx, dw: dtypes of the gradients, None to skip one.
    """
    dy, x = inner_contiguous(dy), inner_contiguous(x)
    M, N = x.shape
    x_grad = noted(x.new_empty(0 if dx is None else (M, N), dtype=dx))
    if x.numel() == 0:
        return x_grad, x.new_zeros(0 if dw is None else N, dtype=dw)
    grid, tile = backward_tile(x, dy.element_size() + x.element_size())
    partials = new_partials(x, grid[0], dw)
    align, strides = row_strides(dy, x)
    with guard(x):
        mean = None
        if is_wide(N) and dx is not None:
            mean = noted(x.new_empty(M, dtype=torch.float32))
            launch(rms_norm_gradient_mean_kernel, (M,), dy, x, weight, rstd, mean, *strides, N, align, **wide_tile())
        tensors = (dy, x, weight, rstd, mean, None if dx is None else x_grad, *partials)
        launch(rms_norm_backward_kernel, grid, *tensors, *strides, M, N, align, **tile)
        return x_grad, sum_partials(x, partials, dw)[0]
