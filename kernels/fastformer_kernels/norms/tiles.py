"""The grids and tiles of the norms' kernels, and the strides of rows."""

import math

from torch import Tensor

from fastformer_kernels.host.launch import cdiv, device_of, power_of_two

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
    """Choose the forward tile of rows that fit in one (`is_wide`): a warp for 1,024 columns, and two rows at least.

    Of more than 4,096 columns it is one row. Rows of up to 1,024 are summed within a warp, without barriers. On an H200
    layer norm of rows of 512, 768, 1,024, 2,048 and 8,192 took 0.96, 0.75, 1.01, 0.99 and 0.71 of the time of 4 warps
    and more with 16 elements a thread.
    """
    BLOCK_N = power_of_two(N, 16)
    rows = 2 if BLOCK_N <= 4096 else 1  # two of 8,192 took 1.08 times as long
    return {"BLOCK_M": max(1024 // BLOCK_N, rows), "BLOCK_N": BLOCK_N, "num_warps": max(BLOCK_N // 1024, 1)}


def dropout_tile(N: int) -> dict[str, int]:
    """Choose the forward tile with dropout and residual: two rows at least, 32 elements a thread.

    `forward_tile` has up to 64; here the residual and random numbers take registers, too.
    """
    BLOCK_N = power_of_two(N, 16)
    return {"BLOCK_M": max(1024 // BLOCK_N, 2), "BLOCK_N": BLOCK_N, "num_warps": max(BLOCK_N // 512, 1)}


def wide_tile() -> dict[str, int]:
    """Choose the tile of a kernel that passes over wide rows, one a program. Other tiles were not timed on a GPU."""
    return {"BLOCK_N": 4096, "STAGES": 3, "num_warps": 16}


def backward_tile(x: Tensor, bytes_a_column: int, elements: int = 16) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the grid and the tile of a backward kernel for x `[M, N]`.

    A tile is whole rows, `elements` for each thread; a wide row is cut into ranges of columns, one per program. As many
    programs walk over all tiles as run at once: 16 warps a multiprocessor, at 128 registers a thread. If rows are not
    aligned, threads take more registers, and 8 warps run. On sm_100 a thread holds 8 elements up to 4,096 columns,
    because Triton 3.9 takes more registers there. Loads run up to two tiles ahead: 64 KB of half precision at 16
    elements a thread. More and smaller programs would write more rows of partial sums: for 4,096 rows of 512 these are
    a quarter of all bytes already. On an H200 other tiles were at most 3 % faster from 768 columns on.

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

    ALIGN divides 16 bytes and the length of a row. Kernels multiply strides by it, so the compiler knows that rows load
    in whole vectors.
    """
    present = [x for x in matrices if x is not None]
    strides = [0 if x is None else x.stride(0) if x.shape[0] > 1 else x.shape[1] for x in matrices]  # of one row: any
    align = math.gcd(16 // min(x.element_size() for x in present), present[0].shape[1], *strides)
    return align, tuple([stride // align for stride in strides])


def elementwise(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose grid and tile of an elementwise kernel on `[M, N]`: 16 elements a thread. Others were not timed."""
    M, N = x.shape
    BLOCK_N = min(power_of_two(N, 16), TILE)
    BLOCK_M = TILE // BLOCK_N
    return (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 4}


def elements_a_thread(N: int, mixed: bool) -> int | None:
    """Choose how many elements a thread of the backward kernel with a residual holds; None if it cannot take the rows.

    More elements need less synchronisation, until registers spill on sm_80, sm_90 or sm_100. Others were not timed.

    Args:
        N: row length.
        mixed: whether the gradients have more than one dtype, which costs registers.
    """
    if is_wide(N) or (mixed and N > 4096):
        return None
    return 8 if mixed or N <= 2048 else 16
