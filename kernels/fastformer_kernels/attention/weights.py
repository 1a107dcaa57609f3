"""Attention weights on request: recomputed tile by tile from the log-sum-exp that forward saved.

P = exp2(s - lse), after dropout as torch returns them; 0 where a query may not attend.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import Problem, attention_kernel, row_strides, views
from fastformer_kernels.attention.scores import (
    bias_of_head,
    exponentials,
    hide,
    load_bounds,
    load_lse,
    offset,
    scores,
    visible,
)
from fastformer_kernels.host.launch import guard, launch, recorded
from fastformer_kernels.random import keep, row_keys


@attention_kernel
def _attention_weights(
    q_ptr, k_ptr, lse_ptr, weights_ptr, bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr, seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_lse_b, stride_lse_h,
    stride_weights_b, stride_weights_h, stride_weights_t,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, tiles, key_tiles, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute one tile `[BLOCK_T, BLOCK_S]` of the weights of one head."""
    first_row = tl.program_id(0) % tiles * BLOCK_T
    first = tl.program_id(0) // tiles % key_tiles * BLOCK_S
    b, h = tl.program_id(0) // tiles // key_tiles // H, tl.program_id(0) // tiles // key_tiles % H
    _, last_query, _, first_key, last_key, shift, _ = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
    rows, columns, dims = first_row + tl.arange(0, BLOCK_T), first + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    in_head = dims[None, :] < K
    wide_rows, wide_columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[:, None]
    q_ptr += offset(b, ALIGN, stride_q_b) + offset(h, ALIGN, stride_q_h)
    k_ptr += offset(b, ALIGN, stride_k_b) + offset(h // GROUP, ALIGN, stride_k_h)
    real_keys = ((columns >= first_key) & (columns < last_key))[:, None] & in_head
    q = tl.load(
        q_ptr + wide_rows * stride_q_t * ALIGN + dims[None, :], mask=(rows < last_query)[:, None] & in_head, other=0.0
    )
    k = tl.load(k_ptr + wide_columns * stride_k_s * ALIGN + dims[None, :], mask=real_keys, other=0.0)
    lse_ptr += offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h)
    lse, logarithm = load_lse(lse_ptr, second_part, rows, last_query, MASK)
    s = scores(tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=tl.float32), scale, softcap, HAS_SOFTCAP)
    seen = visible(rows[:, None], columns[None, :], first_key, last_key, shift, left, right, HAS_LEFT, HAS_RIGHT)
    key_mask_ptr += offset(b, 1, stride_key_mask_b)
    mask_ptr += offset(b, 1, stride_mask_b) + offset(h, 1, stride_mask_h)
    bias_ptr = bias_of_head(bias_ptr, h, stride_bias_h, shift)
    s = hide(s, seen, rows[:, None], columns[None, :], key_mask_ptr, mask_ptr, stride_mask_t, stride_mask_s, bias_ptr,
             T if MASK < 3 else last_query, last_key, HAS_KEY_MASK, MASK)  # fmt: skip
    p = exponentials(s, lse[:, None], logarithm[:, None], MASK)
    if HAS_DROPOUT:
        keys = row_keys(tl.load(seed_ptr), rows, b * H + h)
        p = tl.where(keep(keys[:, None], columns[None, :], threshold), p * keep_scale, 0.0)
    weights_ptr += offset(b, 1, stride_weights_b) + offset(h, 1, stride_weights_h)
    written = (rows < T)[:, None] & (columns < S)[None, :]
    tl.store(weights_ptr + wide_rows * stride_weights_t + columns[None, :], p, mask=written)


def weights(q: Tensor, k: Tensor, lse: Tensor, *arguments: Any) -> Tensor:
    """Compute the weights `[B, H, T, S]` that forward applied, of q's dtype.

    Args:
        q, k, arguments: as in forward, dense.
        lse: as forward returned it.
    """
    problem = Problem.of(*arguments)
    B, H, T, S = problem.sizes(q)
    result = recorded(q.new_empty((B, H, T, S)))
    if result.numel() == 0:
        return result
    align, (q_view, k_view) = views(q, k)
    tile = problem.tile("scores", q)
    tiles, key_tiles = -(-T // tile["BLOCK_T"]), -(-S // tile["BLOCK_S"])
    grid = (B * H * tiles * key_tiles,)
    tensors = (q_view.data, k_view.data, lse, result, *problem.pointers(q))
    strides = (*q_view.strides, *k_view.strides, *row_strides(lse, q), *result.stride()[:3])
    mask_strides = problem.mask_strides((B, H, T, S))
    sizes = (lse.numel() // 2, T, S, tiles, key_tiles)
    scalars = problem.scalars()
    constants = {**problem.switches(q, k, None), "ALIGN": align}
    with guard(q):
        launch(_attention_weights, grid, *tensors, *strides, *mask_strides, *sizes, *scalars, **constants, **tile)
    return result
