"""Fused attention, the gradient of an additive mask: that of the scores, summed over the mask's broadcast dimensions.

A program computes one tile `[BLOCK_T, BLOCK_S]` of the mask, and adds up the batches and heads that share it, in order.
So the result is deterministic, and a smaller mask needs no `[B, H, T, S]` tensor. The caller sums over queries or keys.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import (
    Problem,
    aligned_length,
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
from fastformer_kernels.host.launch import guard, launch, recorded
from fastformer_kernels.random import row_keys


@attention_kernel
def _attention_mask_gradient(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dmask_ptr, dweights_ptr,
    bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr, seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_dout_b, stride_dout_h, stride_dout_t, stride_lse_b, stride_lse_h,
    stride_dmask_b, stride_dmask_h, stride_dmask_t, stride_dweights_b, stride_dweights_h, stride_dweights_t,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, tiles, key_tiles, B, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DWEIGHTS: tl.constexpr,
    SUM_B: tl.constexpr, SUM_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sum the score gradients of one tile over the batches and heads that share the mask."""
    first_row = tl.program_id(0) % tiles * BLOCK_T
    first = tl.program_id(0) // tiles % key_tiles * BLOCK_S
    owner = tl.program_id(0) // tiles // key_tiles
    mask_heads: tl.constexpr = 1 if SUM_H else H
    rows, columns = first_row + tl.arange(0, BLOCK_T), first + tl.arange(0, BLOCK_S)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    wide_rows, wide_columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)
    for shared_b in tl.range(0, B if SUM_B else 1):
        b = shared_b if SUM_B else owner // mask_heads
        _q, last_query, _k, first_key, last_key, moved, _gaps = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
        for shared_h in tl.range(0, H if SUM_H else 1):
            h = shared_h if SUM_H else owner % mask_heads
            q_head = q_ptr + offset(b, ALIGN, stride_q_b) + offset(h, ALIGN, stride_q_h)
            dout_head = dout_ptr + offset(b, ALIGN, stride_dout_b) + offset(h, ALIGN, stride_dout_h)
            k_head = k_ptr + offset(b, ALIGN, stride_k_b) + offset(h // GROUP, ALIGN, stride_k_h)
            v_head = v_ptr + offset(b, ALIGN, stride_v_b) + offset(h // GROUP, ALIGN, stride_v_h)
            row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h)
            real = (rows < last_query)[:, None]
            sequence_key_mask = key_mask_ptr + offset(b, 1, stride_key_mask_b)
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
            if HAS_DWEIGHTS:
                dweights_head = dweights_ptr + offset(b, 1, stride_dweights_b) + offset(h, 1, stride_dweights_h)
                dp += weight_gradient(dweights_head, stride_dweights_t, rows[:, None], columns[None, :], T, last_key)
            keys = row_keys(tl.load(seed_ptr), rows, b * H + h) if HAS_DROPOUT else rows
            low, high = seen_range(rows, first_key, last_key, moved, left, right, HAS_LEFT, HAS_RIGHT)
            _kept, ds = score_gradient(
                dots, dp, lse[:, None], logarithm[:, None], delta[:, None], columns[None, :], low[:, None],
                high[:, None], True, rows[:, None], columns[None, :], keys[:, None], sequence_key_mask,
                mask_ptr + offset(b, 1, stride_mask_b) + offset(h, 1, stride_mask_h), stride_mask_t, stride_mask_s,
                bias_of_head(bias_ptr, h, stride_bias_h, moved), T if MASK < 3 else last_query, last_key,
                scale, softcap, threshold, keep_scale, True, True, False, False,
                HAS_KEY_MASK, MASK, HAS_SOFTCAP, HAS_DROPOUT,
            )  # fmt: skip
            total += ds
    to = dmask_ptr + offset(owner // mask_heads, 1, stride_dmask_b) + offset(owner % mask_heads, 1, stride_dmask_h)
    tl.store(
        to + wide_rows * stride_dmask_t + columns[None, :], total, mask=(rows < T)[:, None] & (columns < S)[None, :]
    )


def mask_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dweights: Tensor | None,
    *arguments: Any,
) -> Tensor:
    """Compute the gradient of the additive mask, fp32 `[B or 1, H or 1, T, S']`: 1 where the mask was broadcast.

    S' is S, rounded up to a multiple of 16: rows are stored in whole vectors, and columns beyond S are not written.
    With unaligned rows, fp32 at head size 128 takes 255 registers and spills, instead of 126 (sm_90, compiled).

    Args:
        dout: of out's shape; only dense tensors have a mask.
        q, k, v, arguments: as in forward.
        lse: as forward returned it; delta: as backward computed it.
        dweights: the gradient of returned weights `[B, H, T, S]`, or None.
    """
    problem = Problem.of(*arguments)
    assert problem.mask is not None
    B, H, T, S = problem.sizes(q)
    shape = (1, 1, 1, 1, *problem.mask.shape)[-4:]
    sum_b, sum_h = shape[0] == 1, shape[1] == 1
    dmask = recorded(q.new_empty((1 if sum_b else B, 1 if sum_h else H, T, aligned_length(S)), dtype=torch.float32))
    if dmask.numel() == 0 or B * H == 0:
        return dmask.zero_()
    align, (q_view, k_view, v_view, dout_view) = views(q, k, v, dout)
    dweights = None if dweights is None else with_aligned_rows(dweights.float())
    tile = problem.tile("scores", wider(q, v))
    tiles, key_tiles = -(-T // tile["BLOCK_T"]), -(-S // tile["BLOCK_S"])
    grid = (dmask.shape[0] * dmask.shape[1] * tiles * key_tiles,)
    looked_up = (q if dweights is None else dweights, *problem.pointers(q))
    tensors = (q_view.data, k_view.data, v_view.data, dout_view.data, lse, delta, dmask, *looked_up)
    input_strides = (*q_view.strides, *k_view.strides, *v_view.strides, *dout_view.strides, *row_strides(lse, q))
    mask_strides = ((0, 0, 0) if dweights is None else dweights.stride()[:3]) + problem.mask_strides((B, H, T, S))
    strides = (*input_strides, *dmask.stride()[:3], *mask_strides)
    sizes = (lse.numel() // 2, T, S, tiles, key_tiles, B)
    scalars = problem.scalars()
    constants = {**problem.switches(q, k, v), "ALIGN": align, "HAS_DWEIGHTS": dweights is not None}
    constants |= {"SUM_B": sum_b, "SUM_H": sum_h}
    with guard(q):
        launch(_attention_mask_gradient, grid, *tensors, *strides, *sizes, *scalars, **constants, **tile)
    return dmask
