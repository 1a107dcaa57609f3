"""Fused attention, forward: softmax(scale q k^T + mask) v, one tile of queries a program, no scores in memory.

The online softmax of FlashAttention (Dao et al. 2022, algorithm 1): a running maximum and sum for each row. Tiles that
no query of the program sees, by lengths, window or causality, are never loaded; tiles that all queries see completely
take a loop without masks. In tf32 and on sm_100, the scores of the next tile precede the softmax of this one: the
matrix units work during the exponentials. Saved for backward: the log-sum-exp of each row, in units of log2,
+inf for a row that sees nothing (its weights are then exp2(-inf) = 0, never NaN).

Dense tensors `[B, H, T, K]` and packed ones `[T, H, K]` run the same kernel: a sequence is a base row and bounds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import (
    Problem,
    attention_kernel,
    exact_precision,
    head_width,
    is_exact,
    row_strides,
    side_by_side,
    views,
    wider,
)
from fastformer_kernels.attention.scores import (
    bias_of_head,
    fold,
    hide,
    key_tiles,
    load_bounds,
    offset,
    place,
    real_columns,
    scores,
    sink,
    visible,
)
from fastformer_kernels.constants import LOG2E
from fastformer_kernels.host.launch import device_of, guard, launch, recorded
from fastformer_kernels.random import row_keys


@triton.jit
def _dots(
    q,
    k_ptrs,
    stride_k_s,
    j,
    real,
    BLOCK_S: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the queries with tile j of the keys: `[BLOCK_T, BLOCK_S]`; keys that are not `real` are 0."""
    k = tl.load(k_ptrs + offset(j, BLOCK_S * ALIGN, stride_k_s), mask=real, other=0.0)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=tl.float32)


@attention_kernel
def _attention(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sinks_ptr, bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr,
    seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_out_b, stride_out_h, stride_out_t, stride_lse_b, stride_lse_h,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, tiles, together, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr, ALIGN: tl.constexpr, RAW: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries `[BLOCK_T]` of one head of one sequence."""
    rank, head = place(tiles, together)
    tile, b, h = tiles - 1 - rank, head // H, head % H  # with causality the last tiles are the longest
    q_base, last_query, k_base, first_key, last_key, shift, gaps = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
    first_row = tile * BLOCK_T
    end_row = last_query if PACKED else T
    if first_row >= end_row:
        return
    rows = first_row + tl.arange(0, BLOCK_T)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q_ptr += offset(b, ALIGN, stride_q_b) + offset(h, ALIGN, stride_q_h) + offset(q_base, ALIGN, stride_q_t)
    k_ptr += offset(b, ALIGN, stride_k_b) + offset(h // GROUP, ALIGN, stride_k_h) + offset(k_base, ALIGN, stride_k_s)
    v_ptr += offset(b, ALIGN, stride_v_b) + offset(h // GROUP, ALIGN, stride_v_h) + offset(k_base, ALIGN, stride_v_s)
    key_mask_ptr += offset(b, 1, stride_key_mask_b)
    mask_ptr += offset(b, 1, stride_mask_b) + offset(h, 1, stride_mask_h)
    bias_ptr = bias_of_head(bias_ptr, h, stride_bias_h, shift)
    masked_rows = T if MASK < 3 else last_query
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    real = (rows < last_query)[:, None]
    q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * stride_q_t * ALIGN + dims[None, :], mask=real & in_head, other=0.0)

    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    peak = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    factor = scale * LOG2E if RAW else 1.0
    keys = row_keys(tl.load(seed_ptr), rows, b * H + h) if HAS_DROPOUT else rows
    begin, full_begin, full_end, end = key_tiles(
        first_row, tl.minimum(first_row + BLOCK_T, last_query) - 1, first_key, last_key, shift, left, right, gaps,
        HAS_LEFT, HAS_RIGHT, MASK != 0, BLOCK_S,
    )  # fmt: skip
    end = tl.where(first_row < last_query, end, begin)  # a tile of padded queries sees nothing
    full_end = tl.where(first_row < last_query, full_end, full_begin)

    # First the whole tiles, then those that need masks.
    whole, count = full_end - full_begin, end - begin
    columns = tl.arange(0, BLOCK_S)
    k_ptrs = k_ptr + columns.to(tl.int64)[:, None] * stride_k_s * ALIGN + dims[None, :]
    v_ptrs = v_ptr + columns.to(tl.int64)[:, None] * stride_v_s * ALIGN + v_dims[None, :]
    j = tl.where(whole > 0, full_begin, begin)
    next_dots = acc  # so that the name exists without AHEAD
    if AHEAD:
        loaded = (j * BLOCK_S + columns < last_key)[:, None] & in_head
        next_dots = _dots(q, k_ptrs, stride_k_s, j, loaded, BLOCK_S, ALIGN, PRECISION)
    for i in tl.range(0, whole):
        j = full_begin + i
        n = tl.where(i + 1 < whole, j + 1, begin + tl.where(begin < full_begin, 0, whole))
        dots = next_dots
        if AHEAD:
            loaded = (n * BLOCK_S + columns < last_key)[:, None] & in_head
            next_dots = _dots(q, k_ptrs, stride_k_s, n, loaded, BLOCK_S, ALIGN, PRECISION)
        else:
            dots = _dots(q, k_ptrs, stride_k_s, j, in_head, BLOCK_S, ALIGN, PRECISION)
        v = tl.load(v_ptrs + offset(j, BLOCK_S * ALIGN, stride_v_s), mask=in_value, other=0.0)
        s = dots if RAW else scores(dots, scale, softcap, HAS_SOFTCAP)
        at = j * BLOCK_S + columns
        acc, total, peak = fold(acc, total, peak, s, factor, v, keys, at, threshold, HAS_DROPOUT, PRECISION)
    # One stage at head size 256, where two pipelined loops spilled 16 bytes (sm_80): this loop has one or two tiles.
    for i in tl.range(0, count - whole, num_stages=1 if BLOCK_S == 64 and BLOCK_V == 256 else None):
        j, n = begin + i, begin + i + 1
        j = tl.where(j < full_begin, j, j + whole)
        n = tl.where(n < full_begin, n, n + whole)
        at = j * BLOCK_S + columns
        real_keys = real_columns(at, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]
        dots = next_dots
        # Loads of keys do not wait for the key mask: the scores of keys in its gaps are hidden below.
        loaded = ((n if AHEAD else j) * BLOCK_S + columns < last_key)[:, None] & in_head
        if AHEAD:
            next_dots = _dots(q, k_ptrs, stride_k_s, n, loaded, BLOCK_S, ALIGN, PRECISION)
        else:
            loaded = loaded if HAS_KEY_MASK else real_keys & in_head
            dots = _dots(q, k_ptrs, stride_k_s, j, loaded, BLOCK_S, ALIGN, PRECISION)
        v = tl.load(v_ptrs + offset(j, BLOCK_S * ALIGN, stride_v_s), mask=real_keys & in_value, other=0.0)
        s = dots if RAW else scores(dots, scale, softcap, HAS_SOFTCAP)
        seen = visible(rows[:, None], at[None, :], first_key, last_key, shift, left, right, HAS_LEFT, HAS_RIGHT)
        s = hide(s, seen, rows[:, None], at[None, :], key_mask_ptr, mask_ptr, stride_mask_t, stride_mask_s, bias_ptr,
                 masked_rows, last_key, HAS_KEY_MASK, MASK)  # fmt: skip
        acc, total, peak = fold(acc, total, peak, s, factor, v, keys, at, threshold, HAS_DROPOUT, PRECISION)

    peak *= factor
    # A row with NaN is alive, so NaN reaches the output. So is a row whose peak only the factor made infinite, which
    # makes all weights 0.
    alive = ((total != 0.0) | (peak == float("inf"))) & (rows < last_query)
    if HAS_SINKS:
        total += sink(peak, sinks_ptr, h)
    scaled = tl.where(alive, keep_scale / tl.where(alive, total, 1.0), 0.0)
    out = tl.where(alive[:, None], acc * scaled[:, None], 0.0)
    out_ptr += offset(b, ALIGN, stride_out_b) + offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)
    written = (rows < end_row)[:, None] & in_value
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * stride_out_t * ALIGN + v_dims[None, :], out, mask=written)
    lse_ptr += offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base
    logarithm = tl.log2(tl.where(alive, total, 1.0))
    highest = tl.where(alive, peak, float("inf"))
    if MASK >= 2:
        tl.store(lse_ptr + rows, highest, mask=rows < end_row)
        tl.store(lse_ptr + second_part + rows, logarithm, mask=rows < end_row)
    else:
        tl.store(lse_ptr + rows, highest + logarithm, mask=rows < end_row)


def _ahead(wide: Tensor) -> bool:
    """Choose whether the scores of the next tile are computed before the softmax of this one.

    Only in tf32, and on sm_100: elsewhere other warps multiply meanwhile, and carrying scores costs instructions and
    registers.
    """
    return not is_exact(wide) and (wide.element_size() > 2 or device_of(wide).architecture == "sm_100")


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        q: `[B, H, T, K]`, or packed `[T, H, K]`; fp32, fp16 or bf16.
        k, v: `[B, Hkv, S, K]` and `[B, Hkv, S, V]`, or packed `[S, Hkv, K]` and `[S, Hkv, V]`; of q's dtype.
        arguments: the fields of `Problem`, in order.

    Returns:
        The output, `[B, H, T, V]` (laid out as `[B, T, H, V]`) or packed `[T, H, V]`, and the log-sum-exp of each row
        in units of log2, fp32 `[B, H, T]` or packed `[H, T]`; with an additive mask or a bias `[2, ...]`, maximum
        and logarithm of the sum. It includes a sink like a key.
    """
    problem = Problem.of(*arguments)
    B, H, T, S = problem.sizes(q)
    packed = q.dim() == 3
    V = v.shape[-1]
    out = recorded(q.new_empty((*q.shape[:2], V)) if packed else q.new_empty((B, T, H, V)).transpose(1, 2))
    lse = recorded(q.new_empty(problem.rows(q), dtype=torch.float32))
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("inf"))
    align, (q_view, k_view, v_view, out_view) = views(q, k, v, out)
    wide = wider(q, v)
    tile = problem.tile("forward", wide, *(["narrow values"] if head_width(v) < head_width(wide) else []))
    tiles = -(-T // tile["BLOCK_T"])
    grid = (B * H * tiles,)
    together = side_by_side(q, problem, B * H, S * (q.shape[-1] + V) * q.element_size() * k.shape[1] // H)
    tensors = (
        q_view.data,
        k_view.data,
        v_view.data,
        out,
        lse,
        q if problem.sinks is None else problem.sinks,
        *problem.pointers(q),
    )
    strides = (*q_view.strides, *k_view.strides, *v_view.strides, *out_view.strides, *row_strides(lse, q))
    mask_strides = problem.mask_strides((B, H, T, S))
    sizes = (lse.numel() // 2, T, S, tiles, together)
    scalars = problem.scalars()
    constants = {**problem.switches(q, k, v), "HAS_SINKS": problem.sinks is not None, "ALIGN": align}
    if is_exact(wide):
        constants["PRECISION"] = exact_precision(wide)
    # With a positive scale the highest raw score is the highest scaled score, so the exponent can include the scaling.
    constants["AHEAD"] = _ahead(wide)
    constants["RAW"] = problem.scale > 0.0 and problem.softcap == 0.0 and not problem.added
    with guard(q):
        launch(_attention, grid, *tensors, *strides, *mask_strides, *sizes, *scalars, **constants, **tile)
    return out, lse
