"""The kernels of rows that fit in one tile, backward of all rows, and elementwise kernels of residual + dropout(x).

`norm` has the formulas and the launchers.
"""

import triton
import triton.language as tl

from fastformer_kernels.host.launch import kernel
from fastformer_kernels.norms.rows import (
    divide_by_root_mean_square,
    divide_gradient,
    load_row,
    load_standardised,
    load_tile,
    scale_and_shift,
    standardise,
    standardise_gradient,
    store_mean,
    store_partials,
    two_sums,
)
from fastformer_kernels.random import keep_tile


@triton.jit
def dropped(x, seed_ptr, rows, first_column, threshold, scale):
    """Apply dropout to a tile x of fp32 numbers; none if the seed is None."""
    if seed_ptr is not None:
        keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, x.shape[0], x.shape[1])
        x = tl.where(keep, x * scale, 0.0)
    return x


@kernel(anywhere=["seed_ptr"])
def norm_forward_kernel(
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
    """Normalise BLOCK_M rows of s = residual + dropout(x), or of x: by layer norm, by RMS norm if mean_ptr is None."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts = rows.to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    s = load_tile(x_ptr, starts, stride_x_m, cols, mask, ALIGN)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr, starts, stride_residual_m, cols, mask, ALIGN)
        s = (residual + dropped(s, seed_ptr, rows, 0, threshold, scale)).to(s_ptr.dtype.element_ty)
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
def norm_backward_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
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

    Of layer norm; of RMS norm if mean_ptr is None. Without a residual, dresidual is the gradient of x. A tile holds
    whole rows. Of long rows, it holds the columns that program_id(1) selects, and means_ptr has their means.
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
        dy = load_tile(dy_ptr, starts, stride_dy_m, cols, mask, ALIGN)
        normal, rstd = load_standardised(s_ptr, mean_ptr, rstd_ptr, rows, starts, stride_s_m, cols, mask, M, ALIGN)
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        if mean_ptr is not None:
            if means_ptr is None:
                mean_gs, mean_g = two_sums(g * normal, g)
                mean_gs, mean_g = mean_gs / N, mean_g / N
            else:
                mean_gs = tl.load(means_ptr + rows, rows < M, other=0.0)
                mean_g = tl.load(means_ptr + M + rows, rows < M, other=0.0)
            total = standardise_gradient(g, normal, mean_gs, mean_g, rstd)
        else:
            if means_ptr is None:
                mean_gs = tl.sum(g * normal, 1) / N
            else:
                mean_gs = tl.load(means_ptr + rows, rows < M, other=0.0)
            total = divide_gradient(g, normal, mean_gs, rstd)
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
    """Write dresidual = dnorm + ds (at least one is given) and dx = dropout'(dresidual); each may be None."""
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
