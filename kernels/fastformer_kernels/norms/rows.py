"""What the norm kernels share: loads of tiles, standardisation and its gradient, and sums of the weights' gradients.

A tile is BLOCK_M whole rows if a row fits in one (`tiles.is_wide`), else a part of a row. N is a compile-time
constant: a model has one or two widths, and where N is a power of two no column needs a mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.host.launch import cdiv, kernel, launch, recorded
from fastformer_kernels.sums import sum_rows


@triton.jit
def load_tile(ptr, starts, stride, cols, mask, ALIGN: tl.constexpr):
    """Load a tile of a matrix as fp32, 0 outside."""
    return tl.load(ptr + starts * stride * ALIGN + cols, mask, other=0.0).to(tl.float32)


@triton.jit
def load_row(ptr, cols, N, BLOCK_M: tl.constexpr):
    """Load elements `cols` `[1, BLOCK_N]` of a vector, repeated to `[BLOCK_M, BLOCK_N]` fp32.

    The addresses are repeated, not the values: a tile of one row has another layout, and the compiler computed the rows
    in both layouts.
    """
    cols = tl.broadcast_to(cols, (BLOCK_M, cols.shape[1]))
    return tl.load(ptr + cols, cols < N, other=0.0).to(tl.float32)


@triton.jit
def two_sums(a, b):
    """Sum the rows of two tiles in one reduction, which halves the barriers of two (3 instead of 6 a tile, sm_90)."""
    return tl.split(tl.sum(tl.join(a, b), 1))


@triton.jit
def standardise(x, cols, eps, N: tl.constexpr):
    """Return x̂ = (x - mean) / sqrt(var + eps) of whole rows in fp32, 0 outside, then mean, rest and rstd.

    The mean is rounded at the size of x, an error in every deviation of a row of nearly equal numbers. So the mean of
    the deviations, the rest, is subtracted too.
    """
    mean = tl.sum(x, 1) / N
    deviation = tl.where(cols < N, x - mean[:, None], 0.0)
    rest = tl.sum(deviation, 1) / N
    deviation = tl.where(cols < N, deviation - rest[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(deviation * deviation, 1) / N + eps)
    return deviation * rstd[:, None], mean, rest, rstd


@triton.jit
def store_mean(mean_ptr, mean, rest, rows, M):
    """Write the mean of each row to `[2, M]`, as two numbers whose sum it is: one of fp32 has not enough digits."""
    tl.store(mean_ptr + rows, mean, rows < M)
    tl.store(mean_ptr + M + rows, rest, rows < M)


@triton.jit
def subtract_mean(x, mean_ptr, rows, M):
    """Return x minus the mean of each row, as `store_mean` has written it."""
    x -= tl.load(mean_ptr + rows, rows < M, other=0.0)[:, None]
    return x - tl.load(mean_ptr + M + rows, rows < M, other=0.0)[:, None]


@triton.jit
def divide_by_root_mean_square(x, eps, N: tl.constexpr):
    """Return x / sqrt(mean(x^2) + eps) of whole rows in fp32, which are 0 outside, and 1 / sqrt(mean(x^2) + eps)."""
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    return x * rstd[:, None], rstd


@triton.jit
def scale_and_shift(normal, weight_ptr, bias_ptr, cols, N, BLOCK_M: tl.constexpr):
    """Return normal * weight + bias, either of which may be None."""
    if weight_ptr is not None:
        normal *= load_row(weight_ptr, cols, N, BLOCK_M)
    if bias_ptr is not None:
        normal += load_row(bias_ptr, cols, N, BLOCK_M)
    return normal


@triton.jit
def load_standardised(x_ptr, mean_ptr, rstd_ptr, rows, starts, stride, cols, mask, M, ALIGN: tl.constexpr):
    """Load a tile of x and the statistics of its rows; return x̂ = (x - mean) rstd, without a mean x rstd; and rstd."""
    x = load_tile(x_ptr, starts, stride, cols, mask, ALIGN)
    if mean_ptr is not None:
        x = subtract_mean(x, mean_ptr, rows, M)
    rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
    return x * rstd[:, None], rstd


@triton.jit
def standardise_gradient(g, normal, mean_gx, mean_g, rstd):
    """Return the gradient of x, from g, that of x̂ = normal, mean(g x̂) and mean(g) of each row."""
    return (g - normal * mean_gx[:, None] - mean_g[:, None]) * rstd[:, None]


@triton.jit
def divide_gradient(g, normal, mean_gx, rstd):
    """Return the gradient of x where x̂ = normal is x divided by its root mean square, from g and mean(g x̂)."""
    return (g - normal * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def store_partials(dw_ptr, db_ptr, dw, db, cols, N: tl.constexpr, loaded: tl.constexpr):
    """Write this program's row of the partial sums `[programs, N]`, of what is not None."""
    program = tl.program_id(0)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * N + cols, sum_rows(dw, loaded)[None, :], cols < N)
    if db_ptr is not None:
        tl.store(db_ptr + program * N + cols, sum_rows(db, loaded)[None, :], cols < N)


@kernel()
def norm_sum_partials_kernel(
    dw_partials_ptr,
    db_partials_ptr,
    dw_ptr,
    db_ptr,
    programs,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the partial sums `[programs, N]` of dw and db, either of which may be None, always in the same order."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for first in tl.range(0, programs, BLOCK_P, num_stages=3):
        rows = first + tl.arange(0, BLOCK_P)[:, None]
        mask = (rows < programs) & (cols < N)
        if dw_ptr is not None:
            dw += tl.load(dw_partials_ptr + rows * N + cols, mask, other=0.0)
        if db_ptr is not None:
            db += tl.load(db_partials_ptr + rows * N + cols, mask, other=0.0)
    if dw_ptr is not None:
        tl.store(dw_ptr + cols, tl.sum(dw, 0)[None, :], cols < N)
    if db_ptr is not None:
        tl.store(db_ptr + cols, tl.sum(db, 0)[None, :], cols < N)


def new_partials(x: Tensor, programs: int, *dtypes: torch.dtype | None) -> list[Tensor | None]:
    """Allocate partial sums, fp32 `[programs, N]`, for each gradient whose dtype is not None."""
    return [
        None if dtype is None else recorded(x.new_empty((programs, x.shape[1]), dtype=torch.float32))
        for dtype in dtypes
    ]


def sum_partials(
    x: Tensor, partials: list[Tensor | None], dw: torch.dtype | None, db: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return dw and db `[N]` in these dtypes; of 0 elements if the dtype is None."""
    N = x.shape[1]
    sums = [None if dtype is None else recorded(x.new_empty(N, dtype=dtype)) for dtype in (dw, db)]
    some = next((partial for partial in partials if partial is not None), None)
    if some is not None:
        dw_partials, db_partials = (*partials, None)[:2]
        # Few columns a program, so that there are 32 of them at N = 512.
        BLOCK_N = 16 if N <= 2048 else 64
        tile = {"BLOCK_P": 1024 // BLOCK_N, "BLOCK_N": BLOCK_N}
        tensors = (dw_partials, db_partials, *sums)
        launch(norm_sum_partials_kernel, (cdiv(N, BLOCK_N),), *tensors, some.shape[0], N, **tile)
    return tuple(recorded(x.new_empty(0)) if total is None else total for total in sums)
