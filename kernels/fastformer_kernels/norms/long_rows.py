"""The norms of rows that are too long for one tile: two passes over their columns, in tiles of a part of one row."""

import triton.language as tl

from fastformer_kernels.host.launch import kernel
from fastformer_kernels.norms.rows import load_row, load_tile, scale_and_shift, store_mean


@kernel("N")
def long_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    stride_x_m,
    N,
    eps,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Normalise one long row: a pass for the statistics, a pass for y. RMS norm if mean_ptr is None.

    For layer norm, each column of the tile keeps the mean and the sum of squared deviations of its numbers (Welford
    1962); at the end those of all columns are combined (Chan et al. 1979). The mean of the first tile is subtracted
    from all numbers, because otherwise each mean would be rounded at their size.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_N)[None, :]
    means = tl.zeros((1, BLOCK_N), tl.float32)
    squares = tl.zeros((1, BLOCK_N), tl.float32)
    if mean_ptr is not None:
        first_mean = tl.sum(load_tile(x_ptr, row, stride_x_m, lanes, lanes < N, ALIGN)) / tl.minimum(N, BLOCK_N)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + lanes
        x = load_tile(x_ptr, row, stride_x_m, cols, cols < N, ALIGN)
        if mean_ptr is not None:
            x -= first_mean
            change = tl.where(cols < N, x - means, 0.0)
            means += change * (1.0 / (first // BLOCK_N + 1))
            squares += change * (x - means)
        else:
            squares += x * x
    if mean_ptr is not None:
        counts = ((N - 1 - lanes) // BLOCK_N + 1).to(tl.float32)
        rest = tl.sum(means * counts) / N
        squares += counts * (means - rest) * (means - rest)
    rstd = tl.rsqrt(tl.sum(squares) / N + eps)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + lanes
        x = load_tile(x_ptr, row, stride_x_m, cols, cols < N, ALIGN)
        if mean_ptr is not None:
            x = x - first_mean - rest
        y = scale_and_shift(x * rstd, weight_ptr, bias_ptr, cols, N, 1)
        tl.store(y_ptr + row * N + cols, y, cols < N)
    if mean_ptr is not None:
        store_mean(mean_ptr, first_mean, rest, row, tl.num_programs(0))
    tl.store(rstd_ptr + row, rstd)


@kernel("N")
def long_norm_gradient_means_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    means_ptr,
    stride_dy_m,
    stride_x_m,
    N,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write mean(g x̂) and, of layer norm, mean(g) of one long row to `[2, M]`: the first pass of its backward."""
    row = tl.program_id(0).to(tl.int64)
    if mean_ptr is not None:
        mean, rest = tl.load(mean_ptr + row), tl.load(mean_ptr + tl.num_programs(0) + row)
    sum_gx = tl.zeros((1, BLOCK_N), tl.float32)
    sum_g = tl.zeros((1, BLOCK_N), tl.float32)
    for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = first + tl.arange(0, BLOCK_N)[None, :]
        g = load_tile(dy_ptr, row, stride_dy_m, cols, cols < N, ALIGN)
        x = load_tile(x_ptr, row, stride_x_m, cols, cols < N, ALIGN)
        if mean_ptr is not None:
            x = x - mean - rest
        if weight_ptr is not None:
            g *= load_row(weight_ptr, cols, N, 1)
        sum_gx += g * x
        sum_g += g
    tl.store(means_ptr + row, tl.sum(sum_gx) * tl.load(rstd_ptr + row) / N)
    if mean_ptr is not None:
        tl.store(means_ptr + tl.num_programs(0) + row, tl.sum(sum_g) / N)
