"""Fused attention, the gradient of a bias by distance: that of the scores, summed over all pairs of a distance.

Tiles of scores `[BLOCK_T, BLOCK_S]` on one diagonal have the same distances at the same places. That holds for all
sequences if columns count from the diagonal of the sequence. So a program walks along such a diagonal, tile after tile
and sequence after sequence, and adds up one tile: in order, in fp32, without a `[T, S]` tensor. Its output grows with
the length, not with the square; a second kernel sums the diagonals within the tiles.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import (
    Problem,
    attention_kernel,
    row_strides,
    views,
    wider,
    with_aligned_rows,
)
from fastformer_kernels.attention.scores import (
    bias_of_head,
    load_bounds,
    load_lse,
    offset,
    real_columns,
    score_gradient,
    seen_range,
    weight_gradient,
)
from fastformer_kernels.host.launch import device_of, guard, launch, recorded
from fastformer_kernels.random import row_keys


@attention_kernel
def _attention_bias_gradient(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, lines_ptr, dweights_ptr,
    bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr, seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_dout_b, stride_dout_h, stride_dout_t, stride_lse_b, stride_lse_h,
    stride_dweights_b, stride_dweights_h, stride_dweights_t,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, diagonals, first_diagonal, parts, B, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DWEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sum the score gradients of one diagonal of tiles of one head, over every `parts`-th sequence."""
    diagonal = tl.program_id(0) % diagonals
    h = tl.program_id(0) // diagonals % H
    part = tl.program_id(0) // diagonals // H
    distance = (first_diagonal + diagonal) * BLOCK_S  # of the first column from the first row, but for the shift
    steps, columns_of_tile = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    q_ptr += offset(h, ALIGN, stride_q_h)
    dout_ptr += offset(h, ALIGN, stride_dout_h)
    k_ptr += offset(h // GROUP, ALIGN, stride_k_h)
    v_ptr += offset(h // GROUP, ALIGN, stride_v_h)
    mask_ptr += offset(h, 1, stride_mask_h)
    dweights_ptr += offset(h, 1, stride_dweights_h)
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    for b in tl.range(part, B, parts):
        q_base, last_query, k_base, first_key, last_key, moved, _gaps = load_bounds(
            bounds_ptr, b, T, S, shift, HAS_BOUNDS
        )
        q_head = q_ptr + offset(b, ALIGN, stride_q_b) + offset(q_base, ALIGN, stride_q_t)
        dout_head = dout_ptr + offset(b, ALIGN, stride_dout_b) + offset(q_base, ALIGN, stride_dout_t)
        k_head = k_ptr + offset(b, ALIGN, stride_k_b) + offset(k_base, ALIGN, stride_k_s)
        v_head = v_ptr + offset(b, ALIGN, stride_v_b) + offset(k_base, ALIGN, stride_v_s)
        row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base
        sequence_key_mask = key_mask_ptr + offset(b, 1, stride_key_mask_b)
        sequence_mask = mask_ptr + offset(b, 1, stride_mask_b)
        head_bias = bias_of_head(bias_ptr, h, stride_bias_h, moved)
        sequence_dweights = dweights_ptr + offset(b, 1, stride_dweights_b)
        # The tiles with columns among the keys; none on a diagonal that the window hides.
        begin = tl.cdiv(tl.maximum(first_key - moved - distance - BLOCK_S + 1, 0), BLOCK_T)
        end = tl.cdiv(tl.minimum(last_query, tl.maximum(last_key - moved - distance, 0)), BLOCK_T)
        if HAS_RIGHT:
            end = tl.where(distance - BLOCK_T + 1 > right, begin, end)
        if HAS_LEFT:
            end = tl.where(distance + BLOCK_S - 1 < -left, begin, end)
        for i in tl.range(begin, end):
            rows = i * BLOCK_T + steps
            columns = i * BLOCK_T + moved + distance + columns_of_tile
            wide_rows, wide_columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[:, None]
            real = (rows < last_query)[:, None]
            real_keys = real_columns(columns, first_key, last_key, sequence_key_mask, HAS_KEY_MASK)[:, None]
            q = tl.load(q_head + wide_rows * stride_q_t * ALIGN + dims[None, :], mask=real & in_head, other=0.0)
            dout = tl.load(
                dout_head + wide_rows * stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_value, other=0.0
            )
            k = tl.load(k_head + wide_columns * stride_k_s * ALIGN + dims[None, :], mask=real_keys & in_head, other=0.0)
            v = tl.load(
                v_head + wide_columns * stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_value, other=0.0
            )
            lse, logarithm = load_lse(lse_ptr + row_base, second_part, rows, last_query, MASK)
            delta = tl.load(delta_ptr + row_base + rows, mask=rows < last_query, other=0.0)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=tl.float32)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION, out_dtype=tl.float32)
            known = tl.maximum(columns, 0)[None, :]  # no mask is read before key 0
            if HAS_DWEIGHTS:
                dp += weight_gradient(sequence_dweights, stride_dweights_t, rows[:, None], known, T, last_key)
            keys = row_keys(tl.load(seed_ptr), rows, b * H + h) if HAS_DROPOUT else rows
            low, high = seen_range(rows, first_key, last_key, moved, left, right, HAS_LEFT, HAS_RIGHT)
            _kept, ds = score_gradient(
                dots, dp, lse[:, None], logarithm[:, None], delta[:, None], columns[None, :], low[:, None],
                high[:, None], True, rows[:, None], known, keys[:, None], sequence_key_mask,
                sequence_mask, stride_mask_t, stride_mask_s, head_bias,
                last_query, last_key, scale, softcap, threshold, keep_scale, True, True, False, False,
                HAS_KEY_MASK, MASK, HAS_SOFTCAP, HAS_DROPOUT,
            )  # fmt: skip
            total += ds
    line = diagonals * BLOCK_S
    at = (
        lines_ptr
        + offset(tl.program_id(0) // diagonals, BLOCK_T, line)
        + steps.to(tl.int64)[:, None] * line
        + diagonal * BLOCK_S
    )
    tl.store(at + columns_of_tile[None, :], total)


@attention_kernel
def _attention_bias_sum(
    lines_ptr, dbias_ptr, line, first_diagonal, positions, longest, parts, blocks,
    H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the partial sums of BLOCK_D distances of one head; 0 for distances beyond the longest sequence.

    Row r of the tiles of all diagonals is one line, in which a distance is r columns further right than in row 0.
    """
    block, h = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    places = block * BLOCK_D + tl.arange(0, BLOCK_D)
    distances = places - (positions - 1)
    met = (distances < longest) & (distances > -longest)
    at = (distances - first_diagonal * BLOCK_S)[None, :] + tl.arange(0, BLOCK_T).to(tl.int64)[:, None] * (line + 1)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for part in tl.range(0, parts):
        total += tl.sum(tl.load(lines_ptr + offset(part * H + h, BLOCK_T, line) + at, mask=met[None, :], other=0.0), 0)
    tl.store(dbias_ptr + offset(h, 1, 2 * positions - 1) + places, total, mask=places < 2 * positions - 1)


def bias_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dweights: Tensor | None,
    *arguments: Any,
) -> Tensor:
    """Compute the gradient of the bias, fp32 `[H, 2 * P - 1]`.

    Args:
        dout: of out's shape.
        q, k, v, arguments: as in forward.
        lse: as forward returned it; delta: as backward computed it.
        dweights: the gradient of returned weights `[B, H, T, S]`, or None.
    """
    problem = Problem.of(*arguments)
    assert problem.distance_bias is not None
    B, H, T, S = problem.sizes(q)
    positions, longest = (problem.distance_bias.shape[1] + 1) // 2, max(T, S)
    dbias = recorded(q.new_empty((H, 2 * positions - 1), dtype=torch.float32))
    if B == 0 or q.numel() == 0 or k.numel() == 0:
        return dbias.zero_()
    align, (q_view, k_view, v_view, dout_view) = views(q, k, v, dout)
    dweights = None if dweights is None else with_aligned_rows(dweights.float())
    wide = wider(q, v)
    tile = problem.tile("bias", wide)
    BLOCK_T, BLOCK_S = tile["BLOCK_T"], tile["BLOCK_S"]
    # Distances count from the first row of a tile: at most BLOCK_T - 1 more than from the column's own row.
    first, last = -(-(longest - 1) // BLOCK_S), (longest - 1 + BLOCK_T - 1) // BLOCK_S
    first, diagonals = -first, last + first + 1
    # Two programs per multiprocessor; with few heads and diagonals, each takes a part of the sequences.
    parts = max(1, min(B, 2 * device_of(q).multiprocessors // (H * diagonals)))
    line = diagonals * BLOCK_S
    lines = recorded(q.new_empty((parts, H, BLOCK_T, line), dtype=torch.float32))
    looked_up = (q if dweights is None else dweights, *problem.pointers(q))
    tensors = (q_view.data, k_view.data, v_view.data, dout_view.data, lse, delta, lines, *looked_up)
    input_strides = (*q_view.strides, *k_view.strides, *v_view.strides, *dout_view.strides, *row_strides(lse, q))
    mask_strides = ((0, 0, 0) if dweights is None else dweights.stride()[:3]) + problem.mask_strides((B, H, T, S))
    strides = (*input_strides, *mask_strides)
    sizes = (lse.numel() // 2, T, S, diagonals, first, parts, B)
    scalars = problem.scalars()
    constants = {**problem.switches(q, k, v), "ALIGN": align, "HAS_DWEIGHTS": dweights is not None}
    grid = (parts * H * diagonals,)
    with guard(q):
        launch(_attention_bias_gradient, grid, *tensors, *strides, *sizes, *scalars, **constants, **tile)
        blocks = -(-(2 * positions - 1) // 128)
        sizes = (line, first, positions, longest, parts, blocks)
        tile = {"BLOCK_T": BLOCK_T, "BLOCK_S": BLOCK_S, "BLOCK_D": 128}
        launch(_attention_bias_sum, (H * blocks,), lines, dbias, *sizes, H=H, **tile, num_warps=4)
    return dbias
