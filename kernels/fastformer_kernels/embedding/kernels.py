"""dropout(scale * weight[id] + table[position]) in one pass, and its backward.

Backward sorts the tokens by id, and adds up the gradients of each id in that order, in two kernels.
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
    power_of_two,
    recorded,
    threshold_and_scale,
)
from fastformer_kernels.random import keep_tile
from fastformer_kernels.sums import sum_rows

PIECE = 128  # the most tokens that one program adds up


@triton.jit
def rows_of(matrix_ptr, ids, count, stride, columns, inside):
    """Load rows of a matrix, fp32; rows outside the matrix are NaN."""
    there = (ids >= 0) & (ids < count)
    at = ids[:, None] * stride + columns[None, :]
    return tl.load(matrix_ptr + at, mask=inside & there[:, None], other=float("nan")).to(tl.float32)


@kernel("N", "stride_weight_v", "stride_table_p", anywhere=["ids_ptr", "positions_ptr", "seed_ptr"])
def embedding_kernel(
    ids_ptr,
    weight_ptr,
    positions_ptr,
    table_ptr,
    seed_ptr,
    out_ptr,
    M,
    N,
    V,
    P,
    stride_weight_v,
    stride_table_p,
    scale,
    threshold,
    dropout_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one tile of out = dropout(scale * weight[ids] + table[positions])."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    ids = tl.load(ids_ptr + rows, mask=rows < M, other=0)
    out = rows_of(weight_ptr, ids, V, stride_weight_v, columns, inside) * scale
    if positions_ptr is not None:
        positions = tl.load(positions_ptr + rows, mask=rows < M, other=0)
        out += rows_of(table_ptr, positions, P, stride_table_p, columns, inside)
    if seed_ptr is not None:
        keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, BLOCK_M, BLOCK_N)
        out = tl.where(keep, out * dropout_scale, 0.0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], out, mask=inside)


@kernel("N", anywhere=["words_ptr", "tokens_ptr", "ends_ptr", "seed_ptr"])
def embedding_backward_kernel(
    dout_ptr,
    words_ptr,
    tokens_ptr,
    ends_ptr,
    seed_ptr,
    dweight_ptr,
    partials_ptr,
    M,
    N,
    V,
    factor,
    threshold,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the gradients of one id's tokens, from an index of the sorted tokens to the end of the id or the piece.

    A piece is PIECE sorted tokens, so that no program takes long for a frequent id. The program of an index works if
    the id or a piece begins there, and the id is a row of the matrix. The sum of an id that ends in the piece in which
    it begins is written to dweight. For other ids, piece p writes row 2 p of the partial sums for the id that began
    before it, and row 2 p + 1 for the id that begins in it.
    """
    first = tl.program_id(0)
    word = tl.load(words_ptr + first)
    begins = (first == 0) | (tl.load(words_ptr + tl.maximum(first - 1, 0)) != word)
    if (begins | (first % PIECE == 0)) & (word >= 0) & (word < V):
        word_end = tl.load(ends_ptr + first)
        piece_end = (first // PIECE + 1) * PIECE
        end = tl.minimum(word_end, piece_end)
        first_column = tl.program_id(1) * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(first, end, BLOCK_M):
            places = start + tl.arange(0, BLOCK_M)
            tokens = tl.load(tokens_ptr + places, mask=places < end, other=0)
            inside = (places < end)[:, None] & (columns < N)[None, :]
            dout = tl.load(dout_ptr + tokens[:, None] * N + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            if seed_ptr is not None:
                keep = keep_tile(tl.load(seed_ptr), tokens, first_column, 0, threshold, BLOCK_M, BLOCK_N)
                dout = tl.where(keep, dout, 0.0)
            total += dout
        row = sum_rows(total, dout_ptr.dtype.element_ty) * factor
        if begins & (word_end <= piece_end):
            tl.store(dweight_ptr + word.to(tl.int64) * N + columns, row, mask=columns < N)
        else:
            partial = 2 * (first // PIECE) + begins.to(tl.int32)
            tl.store(partials_ptr + partial.to(tl.int64) * N + columns, row, mask=columns < N)


@kernel("N", anywhere=["words_ptr", "ends_ptr"])
def embedding_join_kernel(
    words_ptr, ends_ptr, partials_ptr, dweight_ptr, N, V, PIECE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add up the partial sums of the id that begins in a piece and goes on in the next, if there is one."""
    piece = tl.program_id(0)
    first, last = piece * PIECE, (piece + 1) * PIECE - 1
    word, word_end = tl.load(words_ptr + last), tl.load(ends_ptr + last)
    begins = (first == 0) | (tl.load(words_ptr + tl.maximum(first - 1, 0)) != word)
    if begins & (word_end > last + 1) & (word >= 0) & (word < V):
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        partial_ptr = partials_ptr + (2 * piece + 1).to(tl.int64) * N + columns
        total = tl.load(partial_ptr, mask=columns < N, other=0.0)
        partial_ptr += N
        for _ in range(piece + 1, (word_end + PIECE - 1) // PIECE):
            total += tl.load(partial_ptr, mask=columns < N, other=0.0)
            partial_ptr += 2 * N
        tl.store(dweight_ptr + word.to(tl.int64) * N + columns, total, mask=columns < N)


def tile(N: int) -> dict[str, int]:
    """Choose the tile: 16 elements a thread, in whole rows of up to 1,024 elements.

    The row of an id is contiguous, those of consecutive tokens are not: wide tiles read whole cache lines. On an H200
    forward reaches 41 to 56 % of a copy's bandwidth; other tiles were not timed.
    """
    width = min(power_of_two(N, 8), 1024)
    return {"BLOCK_M": 2048 // width, "BLOCK_N": width, "num_warps": 4}


def embedding(
    ids: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    table: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Compute dropout(scale * weight[ids] + table[positions]).

    Args:
        ids: int64 `[...]`.
        weight: `[V, D]`.
        positions: int64 of ids' shape, or None.
        table: `[P, D]`, or None like positions.
        seed: of dropout, int64 `[1]`; None: no dropout.
        scale: of the weight.
        dropout_p: the probability to drop.

    Returns:
        `[..., D]`, of the dtype to which weight and table promote; NaN if an id or a position is out of range.
    """
    dtype = weight.dtype if table is None else torch.promote_types(weight.dtype, table.dtype)
    out = recorded(weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype))
    if out.numel() == 0:
        return out
    M, N = ids.numel(), weight.shape[1]
    ids, weight = ids.contiguous(), inner_contiguous(weight)
    if positions is not None and table is not None:
        positions, table = positions.contiguous(), inner_contiguous(table)
    P, stride_table_p = (0, 0) if table is None else (table.shape[0], table.stride(0))
    block = tile(N)
    grid = (cdiv(M, block["BLOCK_M"]), cdiv(N, block["BLOCK_N"]))
    tensors = (ids, weight, positions, table, seed, out)
    sizes = (M, N, weight.shape[0], P)
    strides = (weight.stride(0), stride_table_p)
    dropout = threshold_and_scale(dropout_p)
    with guard(weight):
        launch(embedding_kernel, grid, *tensors, *sizes, *strides, scale, *dropout, **block)
    return out


def backward(
    dout: Tensor, ids: Tensor, seed: Tensor | None, rows: int, scale: float, dropout_p: float, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient of weight, or of table with positions as ids, always adding up in the same order.

    Args:
        dout: `[..., D]`.
        ids: int64 `[...]`; those out of range are ignored.
        seed, dropout_p: as given to `embedding`.
        rows: V, of the gradient.
        scale: as given to `embedding`; 1 for the table.
        dtype: of the gradient.

    Returns:
        `[V, D]`.
    """
    N, M = dout.shape[-1], ids.numel()
    dweight = dout.new_zeros((rows, N), dtype=dtype)
    if dout.numel() == 0:
        return dweight
    dout = dout.contiguous()
    words, tokens = torch.sort(ids.flatten().clamp(-1, rows).int(), stable=True)
    ends = torch.searchsorted(words, words, right=True, out_int32=True)
    partials = dout.new_empty((2 * cdiv(M, PIECE), N), dtype=torch.float32)
    threshold, dropout_scale = threshold_and_scale(dropout_p if seed is not None else 0.0)
    width = min(power_of_two(N, 8), 512)
    columns = cdiv(N, width)
    tensors = (dout, words, tokens, ends, seed, dweight, partials)
    block = {"PIECE": PIECE, "BLOCK_N": width, "num_warps": 4}
    with guard(dout):
        dropout = scale * dropout_scale, threshold
        launch(embedding_backward_kernel, (M, columns), *tensors, M, N, rows, *dropout, BLOCK_M=4096 // width, **block)
        if M > PIECE:
            grid = (cdiv(M, PIECE) - 1, columns)
            launch(embedding_join_kernel, grid, words, ends, partials, dweight, N, rows, **block)
    return dweight
