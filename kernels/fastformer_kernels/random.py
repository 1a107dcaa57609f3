"""Dropout inside kernels: the decision for an element is the same in every kernel and tile.

Each row draws a key from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function of the
seed, the row and the matrix; each element mixes its column into the key with two multiplications and compares the
upper 16 bits with a threshold. So the keep probability is quantised to 1/65536. The scale is the inverse of the
quantised value, which keeps the expectation unchanged (`host.launch.threshold_and_scale`).

The mixing stays within a thread; benchmarks/NOTES.md compares it with Philox for every element.
"""

import triton
import triton.language as tl

# 7 rounds pass every test of BigCrush (Salmon et al. 2011). Their default of 10 has a safety margin; 7 take 30 % less.
ROUNDS = tl.constexpr(7)
# The golden ratio spreads neighbouring columns over the key's range; the multipliers have the least bias of those that
# Wellons' search for 32-bit hash functions found: how often a flipped input bit flips each output bit.
GOLDEN, FIRST, SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0x21F0AAAD), tl.constexpr(0xD35A2D97)


@triton.jit
def row_keys(seed, rows, stream):
    """Return the key of each row, uint32 of rows' shape.

    Args:
        seed: int64, loaded from the seed tensor.
        rows: integers, each row's index in its matrix; below 2^32.
        stream: the index of the matrix, such as batch * heads + head.
    """
    row = rows.to(tl.int32)
    key, _1, _2, _3 = tl.philox(seed, row, row * 0 + stream, row * 0, row * 0, ROUNDS)
    return key.to(tl.uint32, bitcast=True)


@triton.jit
def keep(keys, columns, threshold):
    """Decide for each element: True = keep. Keys and columns broadcast to the tile, which may be transposed."""
    x = keys + columns.to(tl.uint32) * GOLDEN
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return (x >> 16).to(tl.int32) >= threshold


@triton.jit
def keep_tile(seed, rows, first_column, stream, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decide for a tile `[ROWS, COLUMNS]` that starts at first_column: True = keep."""
    columns = first_column + tl.arange(0, COLUMNS)
    return keep(row_keys(seed, rows, stream)[:, None], columns[None, :], threshold)
