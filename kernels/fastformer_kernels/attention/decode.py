"""Attention of a few queries to many keys, as in decoding with a cache: the keys are split over programs.

One program for each sequence and key head would leave most of a GPU idle at small batches. So the keys are divided: a
program writes the unnormalised sum, maximum and weight of its share, and a second kernel combines the shares
(Flash-Decoding, Dao et al. 2023). With one share the first kernel writes the output.

All query heads that share a key head, and all T queries, are rows of one tile, so that keys and values are read once.
Inference only; no mask other than bounds, key mask, causality, window and a bias by distance; no dropout.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import Problem, attention_kernel, head_size, views, wider
from fastformer_kernels.attention.scores import (
    bias_of_head,
    fold,
    hide,
    key_tiles,
    load_bounds,
    offset,
    real_columns,
    scores,
    sink,
    visible,
)
from fastformer_kernels.host.launch import device_of, guard, launch, power_of_two, recorded


@triton.jit
def _weights_of_rows(total, peak, real, sinks_ptr, h):
    """Return which rows have visible keys, and the sum of their weights, with the sinks; 1 for other rows."""
    alive = (total != 0.0) & real
    if sinks_ptr is not None:
        total += sink(peak, sinks_ptr, h)
    return alive, tl.where(alive, total, 1.0)


@attention_kernel
def _attention_split(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, peak_ptr, total_ptr, sinks_ptr, lengths_ptr, bounds_ptr,
    key_mask_ptr, bias_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_out_b, stride_out_h, stride_out_t, stride_key_mask_b, stride_bias_h,
    T, S, splits, shift, left, right, scale, softcap,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Attend from all T * GROUP rows of one key head to one share of the keys, or to all if part_ptr is None."""
    split, head = tl.program_id(0) % splits, tl.program_id(0) // splits
    b, hk = head // (H // GROUP), head % (H // GROUP)
    _q, last_query, _k, first_key, last_key, shift, gaps = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
    if lengths_ptr is not None:
        last_key = tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int32), 0), S)
    r, steps = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    rows = r // GROUP  # row r is query r // GROUP of the key head's query head r % GROUP
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    real = (rows < last_query)[:, None] & in_head
    q_row = (rows.to(tl.int64) * stride_q_t + (hk * GROUP + r % GROUP).to(tl.int64) * stride_q_h) * ALIGN
    q = tl.load(q_ptr + offset(b, ALIGN, stride_q_b) + q_row[:, None] + dims[None, :], mask=real, other=0.0)
    k_ptr += offset(b, ALIGN, stride_k_b) + offset(hk, ALIGN, stride_k_h)
    v_ptr += offset(b, ALIGN, stride_v_b) + offset(hk, ALIGN, stride_v_h)
    key_mask_ptr += offset(b, 1, stride_key_mask_b)
    bias_ptrs = bias_of_head(bias_ptr, hk * GROUP + r % GROUP, stride_bias_h, shift)[:, None]
    begin, _full, _whole, end = key_tiles(
        0,
        tl.minimum(T, last_query) - 1,
        first_key,
        last_key,
        shift,
        left,
        right,
        gaps,
        HAS_LEFT,
        HAS_RIGHT,
        True,
        BLOCK_S,
    )
    share = tl.cdiv(end - begin, splits)
    begin = begin + split * share
    end = tl.minimum(begin + share, end)
    acc = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for j in tl.range(begin, end):
        columns = j * BLOCK_S + steps
        wide = columns.to(tl.int64)[:, None]
        real_keys = real_columns(columns, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]
        k = tl.load(k_ptr + wide * stride_k_s * ALIGN + dims[None, :], mask=real_keys & in_head, other=0.0)
        v = tl.load(v_ptr + wide * stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_value, other=0.0)
        s = scores(tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=tl.float32), scale, softcap, HAS_SOFTCAP)
        seen = visible(rows[:, None], columns[None, :], first_key, last_key, shift, left, right, HAS_LEFT, HAS_RIGHT)
        s = hide(
            s, seen, rows[:, None], columns[None, :], key_mask_ptr, key_mask_ptr, 0, 0, bias_ptrs, last_query, last_key,
            HAS_KEY_MASK, MASK,
        )  # fmt: skip
        acc, total, peak = fold(acc, total, peak, s, 1.0, v, rows, columns, 0, False, PRECISION)
    written = (rows < T)[:, None] & in_value
    if part_ptr is None:
        h = hk * GROUP + r % GROUP
        alive, total = _weights_of_rows(total, peak, rows < last_query, sinks_ptr, h)
        out = tl.where(alive[:, None], acc / total[:, None], 0.0)
        out_row = (rows.to(tl.int64) * stride_out_t + h.to(tl.int64) * stride_out_h) * ALIGN
        tl.store(out_ptr + offset(b, ALIGN, stride_out_b) + out_row[:, None] + v_dims[None, :], out, mask=written)
    else:  # parts [B * Hkv, splits, T * GROUP, V], peaks and totals without V
        row = (head * splits + split).to(tl.int64) * (T * GROUP) + r
        tl.store(part_ptr + row[:, None] * V + v_dims[None, :], acc, mask=written)
        tl.store(peak_ptr + row, peak, mask=rows < T)
        tl.store(total_ptr + row, total, mask=rows < T)


@attention_kernel
def _attention_combine(
    part_ptr, peak_ptr, total_ptr, out_ptr, bounds_ptr, sinks_ptr, stride_out_b, stride_out_h, stride_out_t, T, splits,
    H: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HAS_BOUNDS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Combine the shares of one row: sum of part * 2^(peak - highest) over sum of total * 2^(peak - highest)."""
    r, head = tl.program_id(0) % (T * GROUP), tl.program_id(0) // (T * GROUP)
    b, hk = head // (H // GROUP), head % (H // GROUP)
    _q, last_query, _k, _first, _last, _shift, _gaps = load_bounds(bounds_ptr, b, T, 0, 0, HAS_BOUNDS)
    dims = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_V,), tl.float32)
    total, peak = 0.0, float("-inf")
    for split in tl.range(0, splits):
        row = (head * splits + split).to(tl.int64) * (T * GROUP) + r
        split_peak = tl.load(peak_ptr + row)
        new_peak = tl.maximum(peak, split_peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade, weight = tl.exp2(peak - base), tl.exp2(split_peak - base)
        acc = acc * fade + tl.load(part_ptr + row * V + dims, mask=dims < V, other=0.0) * weight
        total = total * fade + tl.load(total_ptr + row) * weight
        peak = new_peak
    h = hk * GROUP + r % GROUP
    alive, total = _weights_of_rows(total, peak, r // GROUP < last_query, sinks_ptr, h)
    out = tl.where(alive, acc / total, 0.0)
    out_ptr += offset(b, ALIGN, stride_out_b) + offset(h, ALIGN, stride_out_h) + offset(r // GROUP, ALIGN, stride_out_t)
    tl.store(out_ptr + dims, out, mask=dims < V)


def _shares(q: Tensor, heads: int, tiles: int) -> int:
    """Choose how many shares the keys are split into: two programs a multiprocessor, at least two tiles a share.

    On an H200 the split wins at every size that was timed, by 1.5 to 7 times at one sentence (benchmarks/NOTES.md).
    """
    return max(1, min(2 * device_of(q).multiprocessors // max(heads, 1), tiles // 2))


def decode(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """Compute attention of a few queries, `[B, H, T, V]`, laid out as `[B, T, H, V]`.

    Args:
        q: `[B, H, T, K]`; T * H / Hkv rows are one tile, so that must be small.
        k, v: `[B, Hkv, S, K]` and `[B, Hkv, S, V]`, such as the filled part of a cache.
        arguments: the fields of `Problem`; no mask, no dropout. `bounds` may be the lengths of the keys, integers
            `[B]`, where nothing else limits them but a window that is aligned at the first key.
    """
    problem = Problem.of(*arguments)
    lengths = None
    if problem.bounds is not None and problem.bounds.dim() == 1:
        lengths, problem = problem.bounds.contiguous(), problem._replace(bounds=None)
    B, H, T, S = problem.sizes(q)
    out = recorded(q.new_empty((B, T, H, v.shape[-1])).transpose(1, 2))
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_()
    heads, group, wide = k.shape[1], H // k.shape[1], wider(q, v)
    tile = problem.tile("decode", wide)
    splits = _shares(q, B * heads, -(-S // tile["BLOCK_S"]))
    rows = (B * heads, splits, T * group)
    sizes_of_shares = [(*rows, v.shape[-1]), rows, rows] if splits > 1 else []
    shares = [recorded(q.new_empty(size, dtype=torch.float32)) for size in sizes_of_shares] or [None] * 3
    align, (q_view, k_view, v_view, out_view) = views(q, k, v, out)
    bounds, key_mask, _, bias, _ = problem.pointers(q)
    tensors = (q_view.data, k_view.data, v_view.data, out, *shares, problem.sinks, lengths, bounds, key_mask, bias)
    mask_strides = problem.mask_strides((B, H, T, S))
    input_strides = (*q_view.strides, *k_view.strides, *v_view.strides)
    strides = (*input_strides, *out_view.strides, mask_strides[0], mask_strides[-1])
    sizes = (T, S, splits)
    scalars = problem.scalars()[:5]  # all but dropout's
    shared = {**problem.head_switches(q), "GROUP": group, "ALIGN": align}
    # Tiles of one width: with 192 and 128, sm_80 spilled 8 bytes. Masked columns are not loaded.
    sizes_of_heads = {**head_size("K", q, wide), **head_size("V", v, wide)}
    constants = {**shared, **sizes_of_heads, **problem.score_switches(wide), "BLOCK_R": power_of_two(T * group, 16)}
    constants["MASK"] = problem.mask_kind
    with guard(q):
        launch(_attention_split, (B * heads * splits,), *tensors, *strides, *sizes, *scalars, **constants, **tile)
        if splits > 1:
            grid, constants = (B * heads * T * group,), {**shared, **head_size("V", v, v)}
            tensors = (*shares, out, bounds, problem.sinks)
            launch(_attention_combine, grid, *tensors, *out_view.strides, T, splits, **constants, num_warps=1)
    return out
