"""dropout(scale * weight[id] + table[position]) in one pass, and the first step of its backward.

Backward first applies dropout and scale to the gradient; torch's own kernel then sums it over the tokens of each word,
in a fixed order.
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
from fastformer_kernels.random import keep_tile


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


@kernel("N", anywhere=["seed_ptr"])
def scaled_gradient_kernel(
    dout_ptr, seed_ptr, dx_ptr, M, N, factor, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Compute one tile of dx = dout * factor, 0 where dropout dropped the element."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    dx = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
    if seed_ptr is not None:
        keep = keep_tile(tl.load(seed_ptr), rows, first_column, 0, threshold, BLOCK_M, BLOCK_N)
        dx = tl.where(keep, dx, 0.0)
    tl.store(dx_ptr + at, dx, mask=inside)


def tile(N: int) -> dict[str, int]:
    """Choose the tile: 16 elements a thread, whole rows where they are no longer than that.

    A word's row is contiguous, rows of consecutive tokens are not: wide tiles read whole cache lines. On an H200
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
    out = noted(weight.new_empty((*ids.shape, weight.shape[1]), dtype=dtype))
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


def scaled_gradient(dout: Tensor, seed: Tensor | None, scale: float, dropout_p: float) -> Tensor:
    """Compute the gradient of weight[ids] from that of `embedding`: the same mask, and the scale.

    Args:
        dout: `[..., D]`.
        seed, dropout_p: as given to `embedding`.
        scale: as given to `embedding`; 1 for the gradient of table[positions].

    Returns:
        Of dout's shape and dtype.
    """
    dout = dout.contiguous()
    dx = noted(dout.new_empty(dout.shape))
    if dx.numel() == 0:
        return dx
    N = dout.shape[-1]
    M = dout.numel() // N
    threshold, dropout_scale = threshold_and_scale(dropout_p if seed is not None else 0.0)
    block = tile(N)
    grid = (cdiv(M, block["BLOCK_M"]), cdiv(N, block["BLOCK_N"]))
    with guard(dout):
        launch(scaled_gradient_kernel, grid, dout, seed, dx, M, N, scale * dropout_scale, threshold, **block)
    return dx
