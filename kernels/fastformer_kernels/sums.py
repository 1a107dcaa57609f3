"""The sum over the rows of a tile, where several warps hold them."""

import triton
import triton.language as tl


@triton.jit
def sum_rows(tile, loaded: tl.constexpr):
    """Sum a tile `[rows, columns]` over its rows, in a kernel of 4 warps, or of as many as one row takes.

    A thread holds 16 bytes of a row, in the dtype `loaded`. If several warps hold different rows, `tl.sum` adds them
    through shared memory with bank conflicts: in 16 bits all threads of a warp wrote to one bank. So rows of one thread
    are summed first, then pairs of the APART other rows, for which Triton converts the layout without conflicts.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    APART: tl.constexpr = min(ROWS, max(4 * 32 * 128 // loaded.primitive_bitwidth // COLUMNS, 1))
    total = tl.sum(tl.reshape(tile, (ROWS // APART, APART, COLUMNS)), 0)
    if APART > 1:
        total = tl.trans(total)
        for _ in tl.static_range(10):
            if total.shape[1] > 1:
                first, second = tl.split(tl.reshape(total, (COLUMNS, total.shape[1] // 2, 2)))
                total = first + second
    return tl.reshape(total, (COLUMNS,))
