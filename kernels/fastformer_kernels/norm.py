"""What the norm kernels share: their tiles, standardising one and back, and the weights' gradients.

A tile is BLOCK_M whole rows where a row fits in one (N <= WIDEST). Longer rows take two passes over their columns, in
tiles of a part of one row. N is a compile-time constant: a model has one or two widths, and where N is a power of two
no column needs a mask.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.launch import cdiv, device_of, kernel, launch, noted, power_of_two

# Elements of a tile at 16 elements a thread and 4 warps.
TILE = 2048


def aligned(N: int) -> bool:
    """Whether rows of N elements all begin on 16 bytes, so that loads are wide and can run ahead: all but odd sizes."""
    return N % 16 == 0


def is_wide(N: int) -> bool:
    """Whether rows are too long for one tile, which is held in registers: 16 elements a thread with 16 warps.

    Where rows are not aligned, addresses need registers too, and the limit is half as much.
    """
    longest = 8192 if aligned(N) else 4096
    return longest < N


def forward_tile(N: int) -> dict[str, int]:
    """Choose the tile of a kernel that reads rows once, which are not wide: about TILE elements, 16 a thread.

    That is two 16-byte loads a thread in half precision, and several rows where they are short. Not measured on a GPU.
    """
    BLOCK_N = power_of_two(N, 16)
    return {"BLOCK_M": max(TILE // BLOCK_N, 1), "BLOCK_N": BLOCK_N, "num_warps": max(BLOCK_N // 512, 4)}


def wide_tile() -> dict[str, int]:
    """Choose the tile of a kernel that passes over wide rows, one a program. Not measured on a GPU."""
    return {"BLOCK_N": 4096, "STAGES": 3, "num_warps": 16}


def backward_tile(x: Tensor, bytes_a_column: int, elements: int = 16) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the grid and the tile of a backward kernel for x `[M, N]`.

    Tiles are as in `forward_tile`; a wide row is cut into columns, each program keeping to its own. The programs walk
    over all tiles, as many as run at once: 16 warps a multiprocessor, whose registers just hold them at 128 a thread,
    or 8 where rows are not aligned, which take more. For sm_100 Triton 3.9 needs more too: a thread holds half as much.
    Loads run up to two tiles ahead, with 16 elements a thread 64 KB on their way in half precision. More and smaller
    programs would cost more than they hide, since each leaves a row of partial sums: for 4096 rows of 512 these are a
    quarter of all bytes already. Not measured on a GPU.

    Args:
        x: decides on M, N and the device.
        bytes_a_column: of what is read element by element, all tensors together.
        elements: a thread holds; a power of two.
    """
    M, N = x.shape
    device = device_of(x)
    BLOCK_N = TILE if is_wide(N) else power_of_two(N, 16)
    if device.capability >= 100 and BLOCK_N <= 4096:
        elements = 8
    BLOCK_M = max(4 * 32 * elements // BLOCK_N, 1)
    num_warps = max(BLOCK_N // (32 * elements), 4)
    ahead = 2 if 2 * BLOCK_M * BLOCK_N * bytes_a_column <= device.shared_memory - 4096 else 1
    warps = max(16 if aligned(N) else 8, num_warps)
    maxnreg = min((1 << 16) // (32 * warps), 255)
    parts = cdiv(N, BLOCK_N)
    programs = max(warps // num_warps * device.multiprocessors // parts, 1)
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "STAGES": ahead + 1, "num_warps": num_warps, "maxnreg": maxnreg}
    return (min(cdiv(M, BLOCK_M), programs), parts), tile


def row_strides(*matrices: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """Return what the strides of rows are multiples of, ALIGN in the kernels, and these in units of that; None: 0.

    Up to 16 bytes, as far as the length of a row allows: multiplied in the kernel, it tells the compiler that rows load
    in whole vectors, whatever their number and their distance.
    """
    given = [x for x in matrices if x is not None]
    strides = [0 if x is None else x.stride(0) if x.shape[0] > 1 else x.shape[1] for x in matrices]  # of one row: any
    align = math.gcd(16 // min(x.element_size() for x in given), given[0].shape[1], *strides)
    return align, tuple([stride // align for stride in strides])


@triton.jit
def load_tile(ptr, starts, stride, cols, mask, ALIGN: tl.constexpr):
    """Load a tile of a matrix as fp32, 0 outside."""
    return tl.load(ptr + starts * stride * ALIGN + cols, mask, other=0.0).to(tl.float32)


@triton.jit
def load_row(ptr, cols, N, BLOCK_M: tl.constexpr):
    """Load elements `cols` `[1, BLOCK_N]` of a vector, repeated to `[BLOCK_M, BLOCK_N]` fp32.

    Repeated in the addresses: a tile of one row has a layout of its own, and the compiler computed the rows in both.
    """
    cols = tl.broadcast_to(cols, (BLOCK_M, cols.shape[1]))
    return tl.load(ptr + cols, cols < N, other=0.0).to(tl.float32)


@triton.jit
def two_sums(a, b):
    """Sum the rows of two tiles in one reduction, which halves the barriers of two (3 instead of 6 a tile, sm_90)."""
    return tl.split(tl.sum(tl.join(a, b), 1))


@triton.jit
def standardise(x, cols, eps, N: tl.constexpr):
    """Return (x - mean) / sqrt(var + eps) of whole rows in fp32, 0 outside, their mean and 1 / sqrt(var + eps)."""
    mean = tl.sum(x, 1) / N
    deviation = tl.where(cols < N, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(deviation * deviation, 1) / N + eps)
    return deviation * rstd[:, None], mean, rstd


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
    """Load a tile of x and the statistics of its rows; return x̂ = (x - mean) rstd, and rstd."""
    x = load_tile(x_ptr, starts, stride, cols, mask, ALIGN)
    mean = tl.load(mean_ptr + rows, rows < M, other=0.0)
    rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
    return (x - mean[:, None]) * rstd[:, None], rstd


@triton.jit
def standardise_gradient(g, normal, mean_gx, mean_g, rstd):
    """Return the gradient of x, from g, that of x̂ = normal, mean(g x̂) and mean(g) of each row."""
    return (g - normal * mean_gx[:, None] - mean_g[:, None]) * rstd[:, None]


@triton.jit
def store_partials(dw_ptr, db_ptr, dw, db, cols, N: tl.constexpr):
    """Write this program's row of the partial sums `[programs, N]`, of what is not None."""
    program = tl.program_id(0)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * N + cols, tl.sum(dw, 0)[None, :], cols < N)
    if db_ptr is not None:
        tl.store(db_ptr + program * N + cols, tl.sum(db, 0)[None, :], cols < N)


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
    """Allocate partial sums, fp32 `[programs, N]`, for each gradient that is wanted: whose dtype is not None."""
    return [
        None if dtype is None else noted(x.new_empty((programs, x.shape[1]), dtype=torch.float32)) for dtype in dtypes
    ]


def sum_partials(
    x: Tensor, partials: list[Tensor | None], dw: torch.dtype | None, db: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return dw and db `[N]` in the dtypes given; of 0 elements where that is None."""
    N = x.shape[1]
    sums = [None if dtype is None else noted(x.new_empty(N, dtype=dtype)) for dtype in (dw, db)]
    some = next((partial for partial in partials if partial is not None), None)
    if some is not None:
        dw_partials, db_partials = (*partials, None)[:2]
        # Few columns a program, so that there are 32 of them at N = 512. Not measured on a GPU.
        BLOCK_N = 16 if N <= 2048 else 64
        tile = {"BLOCK_P": 1024 // BLOCK_N, "BLOCK_N": BLOCK_N}
        tensors = (dw_partials, db_partials, *sums)
        launch(norm_sum_partials_kernel, (cdiv(N, BLOCK_N),), *tensors, some.shape[0], N, **tile)
    return tuple(noted(x.new_empty(0)) if total is None else total for total in sums)
