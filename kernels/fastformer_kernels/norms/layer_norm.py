"""Layer normalisation (Ba et al. 2016), y = x̂ w + b with x̂ = (x - mean) / sqrt(var + eps) over rows of N elements.

The gradient with g = dy w (means over the row, sums over the rows):

    dx = (g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps),   dw = sum(dy x̂),   db = sum(dy)

Forward reads x once and writes y: 4 bytes an element in half precision. Backward reads dy and x once and writes dx, 6
bytes: each program walks over many rows and keeps its sums of dw and db in registers; a second kernel adds up the sums
of all programs. The variance is the mean of squared deviations, and the mean is stored as a sum of two numbers,
for rows whose mean is large (`rows.standardise`). Rows longer than `is_wide` allows take two passes, and a backward
pass of 10 bytes.
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.host.launch import cdiv, device_of, guard, inner_contiguous, kernel, launch, noted, power_of_two
from fastformer_kernels.norms.long_rows import layer_norm_gradient_means_kernel, layer_norm_wide_forward_kernel
from fastformer_kernels.norms.rows import (
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

# Elements of a tile at 16 elements a thread and 4 warps.
TILE = 2048


def aligned(N: int) -> bool:
    """Return whether all rows of N elements begin on 16 bytes, so that loads are wide and can be prefetched."""
    return N % 16 == 0


def is_wide(N: int) -> bool:
    """Return whether rows are too long for one tile, which is held in registers: 16 elements a thread with 16 warps.

    If rows are not aligned, addresses need registers too, and the limit is half as much.
    """
    longest = 8192 if aligned(N) else 4096
    return longest < N


def forward_tile(N: int) -> dict[str, int]:
    """Choose the tile of a kernel that reads rows once, not wide ones: a warp for 1,024 columns, and two rows at least.

    Rows of up to 1,024 are summed within a warp, without barriers. On an H200 layer norm of rows of 512, 768, 1,024,
    2,048 and 8,192 took 0.96, 0.75, 1.01, 0.99 and 0.71 of the time of 4 warps and more with 16 elements a thread.
    """
    BLOCK_N = power_of_two(N, 16)
    rows = 2 if BLOCK_N <= 4096 else 1  # two of 8,192 took 1.08 times as long
    return {"BLOCK_M": max(1024 // BLOCK_N, rows), "BLOCK_N": BLOCK_N, "num_warps": max(BLOCK_N // 1024, 1)}


def dropout_tile(N: int) -> dict[str, int]:
    """Choose the tile of forward with dropout and residual: as `forward_tile`, but at most 32 elements a thread.

    More registers are taken here: by the residual, and by random numbers.
    """
    BLOCK_N = power_of_two(N, 16)
    return {"BLOCK_M": max(1024 // BLOCK_N, 2), "BLOCK_N": BLOCK_N, "num_warps": max(BLOCK_N // 512, 1)}


def wide_tile() -> dict[str, int]:
    """Choose the tile of a kernel that passes over wide rows, one a program. Other tiles were not timed on a GPU."""
    return {"BLOCK_N": 4096, "STAGES": 3, "num_warps": 16}


def backward_tile(x: Tensor, bytes_a_column: int, elements: int = 16) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the grid and the tile of a backward kernel for x `[M, N]`.

    Tiles are as in `forward_tile`; a wide row is cut into ranges of columns, one per program. As many programs
    walk over all tiles as run at once: 16 warps a multiprocessor, at 128 registers a thread. If rows are not aligned,
    threads take more registers, and 8 warps run. For sm_100 Triton 3.9 needs more, too: a thread holds half as much.
    Loads run up to two tiles ahead: 64 KB of half precision at 16 elements a thread. More and smaller
    programs would cost more than they hide, since each leaves a row of partial sums: for 4096 rows of 512 these are a
    quarter of all bytes already. On an H200 other tiles were at most 3 % faster from 768 columns on.

    Args:
        x: states M, N and the device.
        bytes_a_column: bytes per element of all tensors that are read.
        elements: per thread; a power of two.
    """
    M, N = x.shape
    device = device_of(x)
    BLOCK_N = TILE if is_wide(N) else power_of_two(N, 16)
    if device.architecture == "sm_100" and BLOCK_N <= 4096:
        elements = 8
    BLOCK_M = max(4 * 32 * elements // BLOCK_N, 1)
    num_warps = max(BLOCK_N // (32 * elements), 4)
    ahead = 2 if 2 * BLOCK_M * BLOCK_N * bytes_a_column <= device.shared_memory - 4096 else 1
    warps = max(16 if aligned(N) else 8, num_warps)
    maxnreg = min((1 << 16) // (32 * warps), 255)
    parts = cdiv(N, BLOCK_N)
    programs = max(warps // num_warps * device.multiprocessors // parts, 1)
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": ahead + 1, "num_warps": num_warps}
    if not device.is_amd:  # AMD's backend has no such option
        tile["maxnreg"] = maxnreg
    return (min(cdiv(M, BLOCK_M), programs), parts), tile


def row_strides(*matrices: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """Return ALIGN, of which all strides of rows are multiples, and the strides in units of ALIGN, 0 for None.

    ALIGN is up to 16 bytes, as the length of a row allows: multiplied in the kernel, it tells the compiler that rows
    load in whole vectors, for any number of rows and any stride.
    """
    present = [x for x in matrices if x is not None]
    strides = [0 if x is None else x.stride(0) if x.shape[0] > 1 else x.shape[1] for x in matrices]  # of one row: any
    align = math.gcd(16 // min(x.element_size() for x in present), present[0].shape[1], *strides)
    return align, tuple([stride // align for stride in strides])


@kernel()
def layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
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
    normal, mean, rest, rstd = standardise(x, cols, eps, N)
    y = scale_and_shift(normal, weight_ptr, bias_ptr, cols, N, BLOCK_M)
    tl.store(y_ptr + starts * N + cols, y, mask)
    store_mean(mean_ptr, mean, rest, rows, M)
    tl.store(rstd_ptr + rows, rstd, rows < M)


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
    stride_dy_m,
    stride_x_m,
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
        dy = load_tile(dy_ptr, starts, stride_dy_m, cols, mask, ALIGN)
        normal, rstd = load_standardised(x_ptr, mean_ptr, rstd_ptr, rows, starts, stride_x_m, cols, mask, M, ALIGN)
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
    store_partials(dw_ptr, db_ptr, dw, db, cols, N, dy_ptr.dtype.element_ty)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y in `dtype`, the rows' mean as the sum of two numbers, fp32 `[2, M]`, and 1 / sqrt(var + eps), `[M]`.

    Args:
        x: `[M, N]`.
        weight, bias: contiguous `[N]`, of any dtype.
        eps: added to the variance.
        dtype: of y.
    """
    x = inner_contiguous(x)
    M, N = x.shape
    y = noted(x.new_empty((M, N), dtype=dtype))
    mean, rstd = (noted(x.new_empty(shape, dtype=torch.float32)) for shape in ((2, M), (M,)))
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
    """Return the gradients of x, weight and bias in the dtypes dx, dw, db; of 0 elements if the dtype is None.

    Args:
        dy: `[M, N]`, the gradient of y.
        x, weight: as in `forward`; mean, rstd: its results.
        dx, dw, db: dtypes of the gradients, None to skip one.
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
