"""s = residual + dropout(x) and its norm y, layer norm or RMS norm, in one pass: 8 bytes an element in half precision.

The gradient, from dy and ds (which may be missing), with the formula of `layer_norm` or `rms_norm`:

    dresidual = d norm(s) + ds,   dx = dropout'(dresidual),   dw, db as there

Backward reads dy, s and ds once, and computes the dropout mask again from its seed. Statistics are those of s in its
stored dtype. For wide rows, and for ds alone, elementwise kernels run before and after those of the norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.host.launch import (
    cdiv,
    guard,
    inner_contiguous,
    kernel,
    launch,
    noted,
    power_of_two,
    threshold_and_scale,
)
from fastformer_kernels.norms import layer_norm, rms_norm
from fastformer_kernels.norms.layer_norm import TILE, backward_tile, dropout_tile, is_wide, row_strides
from fastformer_kernels.norms.rows import (
    divide_by_root_mean_square,
    divide_gradient,
    load_row,
    load_standardised,
    load_tile,
    new_partials,
    scale_and_shift,
    standardise,
    standardise_gradient,
    store_mean,
    store_partials,
    sum_partials,
    two_sums,
)
from fastformer_kernels.random import keep_tile


@triton.jit
def dropped(x, seed_ptr, rows, first_column, threshold, scale):
    """Apply dropout to a tile x of fp32 numbers; none where there is no seed."""
    if seed_ptr is not None:
        keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, x.shape[0], x.shape[1])
        x = tl.where(keep, x * scale, 0.0)
    return x


@kernel(anywhere=["seed_ptr"])
def dropout_add_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    stride_x_m,
    stride_residual_m,
    M,
    threshold,
    scale,
    eps,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add and normalise BLOCK_M rows: by layer norm, or without a mean by RMS norm."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts = rows.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    x = load_tile(x_ptr, starts, stride_x_m, cols, mask, ALIGN)
    residual = load_tile(residual_ptr, starts, stride_residual_m, cols, mask, ALIGN)
    s = (residual + dropped(x, seed_ptr, rows, 0, threshold, scale)).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + starts * N + cols, s, mask)
    s = s.to(tl.float32)
    if mean_ptr is not None:
        normal, mean, rest, rstd = standardise(s, cols, eps, N)
    else:
        normal, rstd = divide_by_root_mean_square(s, eps, N)
    y = scale_and_shift(normal, weight_ptr, bias_ptr, cols, N, BLOCK_M)
    tl.store(y_ptr + starts * N + cols, y, mask)
    if mean_ptr is not None:
        store_mean(mean_ptr, mean, rest, rows, M)
    tl.store(rstd_ptr + rows, rstd, rows < M)


@kernel(anywhere=["seed_ptr"])
def dropout_add_norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    dresidual_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy_m,
    stride_ds_m,
    stride_s_m,
    M,
    threshold,
    scale,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dresidual, dx, and this program's share of dw and db (each may be None), tile by tile of BLOCK_M rows.

    Of layer norm, or without a mean of RMS norm.
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weight_ptr is not None:
        weight = load_row(weight_ptr, cols, N, BLOCK_M)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        starts = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & (cols < N)
        dy = load_tile(dy_ptr, starts, stride_dy_m, cols, mask, ALIGN)
        normal, rstd = load_standardised(s_ptr, mean_ptr, rstd_ptr, rows, starts, stride_s_m, cols, mask, M, ALIGN)
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        if mean_ptr is not None:
            mean_gs, mean_g = two_sums(g * normal, g)
            total = standardise_gradient(g, normal, mean_gs / N, mean_g / N, rstd)
        else:
            total = divide_gradient(g, normal, tl.sum(g * normal, 1) / N, rstd)
        if ds_ptr is not None:
            total += load_tile(ds_ptr, starts, stride_ds_m, cols, mask, ALIGN)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + starts * N + cols, total, mask)
        if dx_ptr is not None:
            tl.store(dx_ptr + starts * N + cols, dropped(total, seed_ptr, rows, 0, threshold, scale), mask)
        dw += dy * normal
        db += dy
    store_partials(dw_ptr, db_ptr, dw, db, cols, N, dy_ptr.dtype.element_ty)


@kernel(anywhere=["seed_ptr"])
def dropout_add_kernel(
    x_ptr,
    residual_ptr,
    seed_ptr,
    s_ptr,
    stride_x_m,
    stride_residual_m,
    M,
    threshold,
    scale,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write s = residual + dropout(x) for a tile."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts = rows.to(tl.int64)[:, None]
    first_column = tl.program_id(1) * BLOCK_N
    cols = first_column + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    x = load_tile(x_ptr, starts, stride_x_m, cols, mask, ALIGN)
    residual = load_tile(residual_ptr, starts, stride_residual_m, cols, mask, ALIGN)
    s = residual + dropped(x, seed_ptr, rows, first_column, threshold, scale)
    tl.store(s_ptr + starts * N + cols, s, mask)


@kernel(anywhere=["seed_ptr"])
def dropout_add_backward_kernel(
    dnorm_ptr,
    ds_ptr,
    seed_ptr,
    dresidual_ptr,
    dx_ptr,
    stride_ds_m,
    M,
    threshold,
    scale,
    N: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write dresidual = dnorm + ds (at least one is given) and dx, dropout's way back; each may be None."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts = rows.to(tl.int64)[:, None]
    first_column = tl.program_id(1) * BLOCK_N
    cols = first_column + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if dnorm_ptr is not None:
        total += load_tile(dnorm_ptr, starts, N, cols, mask, 1)
    if ds_ptr is not None:
        total += load_tile(ds_ptr, starts, stride_ds_m, cols, mask, ALIGN)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + starts * N + cols, total, mask)
    if dx_ptr is not None:
        tl.store(dx_ptr + starts * N + cols, dropped(total, seed_ptr, rows, first_column, threshold, scale), mask)


def elementwise(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose grid and tile of an elementwise kernel on `[M, N]`: 16 elements a thread. Others were not timed."""
    M, N = x.shape
    BLOCK_N = min(power_of_two(N, 16), TILE)
    BLOCK_M = TILE // BLOCK_N
    return (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 4}


def forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    centred: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y in `dtype`, s, and the statistics of the rows of s as its norm returns them; RMS norm: no mean.

    Args:
        x, residual: `[M, N]`; s has the dtype to which both promote.
        weight, bias: contiguous `[N]`, of any dtype.
        seed: of dropout, int64 `[1]`; None: no dropout.
        eps: added to the variance, or to the mean square.
        dropout_p: the probability to drop.
        centred: the norm is layer norm; else RMS norm, which has no bias.
        dtype: of y.
    """
    x, residual = inner_contiguous(x), inner_contiguous(residual)
    M, N = x.shape
    s = noted(x.new_empty((M, N), dtype=torch.promote_types(x.dtype, residual.dtype)))
    align, strides = row_strides(x, residual)
    dropout = threshold_and_scale(dropout_p)
    if x.numel() > 0 and is_wide(N):
        with guard(x):
            grid, tile = elementwise(x)
            launch(dropout_add_kernel, grid, x, residual, seed, s, *strides, M, *dropout, N, align, **tile)
        if centred:
            y, mean, rstd = layer_norm.forward(s, weight, bias, eps, dtype)
            return y, s, mean, rstd
        y, rstd = rms_norm.forward(s, weight, eps, dtype)
        return y, s, noted(x.new_empty(0, dtype=torch.float32)), rstd
    y = noted(x.new_empty((M, N), dtype=dtype))
    mean, rstd = (noted(x.new_empty(shape, dtype=torch.float32)) for shape in ((2, M) if centred else (0,), (M,)))
    if x.numel() > 0:
        tile = dropout_tile(N)
        programs = cdiv(M, tile["BLOCK_M"])
        tensors = (x, residual, weight, bias, seed, y, s, mean if centred else None, rstd)
        scalars = (M, *dropout, eps)
        with guard(x):
            launch(dropout_add_norm_forward_kernel, (programs,), *tensors, *strides, *scalars, N, align, **tile)
    return y, s, mean, rstd


def elements_a_thread(N: int, mixed: bool) -> int | None:
    """Choose how much of a tile each thread of the backward kernel holds; None if the kernel cannot take rows of N.

    More elements need less synchronisation, until registers spill on sm_80, sm_90 or sm_100. Others were not timed.

    Args:
        N: row length.
        mixed: whether the gradients have more than one dtype, which costs registers.
    """
    if is_wide(N) or (mixed and N > 4096):
        return None
    return 8 if mixed or N <= 2048 else 16


def backward(
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
        s, mean, rstd: results of `forward`, mean None of RMS norm; weight, seed, dropout_p: as there.
        dresidual, dx, dw, db: dtypes of the gradients, None to skip one; dw and db only with dy.
    """
    M, N = s.shape
    residual_grad, x_grad = (noted(s.new_empty((M, N) if dtype else 0, dtype=dtype)) for dtype in (dresidual, dx))
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
        tensors = (dy, ds, s, weight, mean, rstd, seed, *written, *partials)
        align, strides = row_strides(dy, ds, s)
        sizes = (M, *dropout, N, align)
        with guard(s):
            launch(dropout_add_norm_backward_kernel, (grid[0],), *tensors, *strides, *sizes, **tile)
            return residual_grad, x_grad, *sum_partials(s, partials, dw, db)
    dnorm, w_grad, b_grad = None, noted(s.new_empty(0)), noted(s.new_empty(0))
    if dy is not None:
        dnorm_dtype = None if written == (None, None) else torch.float32
        if mean is not None:
            dnorm, w_grad, b_grad = layer_norm.backward(dy, s, weight, mean, rstd, dnorm_dtype, dw, db)
        else:
            dnorm, w_grad = rms_norm.backward(dy, s, weight, rstd, dnorm_dtype, dw)
    if written != (None, None):
        grid, tile = elementwise(s)
        align, (_, stride_ds_m) = row_strides(s, ds)
        sizes = (M, *dropout, N, align)
        with guard(s):
            launch(dropout_add_backward_kernel, grid, dnorm, ds, seed, *written, stride_ds_m, *sizes, **tile)
    return residual_grad, x_grad, w_grad, b_grad
