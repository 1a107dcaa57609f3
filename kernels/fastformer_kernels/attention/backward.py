"""Fused attention, backward: gradients of queries, keys and values, weights recomputed tile by tile.

With P = exp2(s - lse), D the dropout mask times its scale, and delta of `delta` (FlashAttention-2, Dao 2023,
algorithm 2):

    dV = (P D)^T dout      dP = (dout V^T + dW) D      dS = P (dP - delta)      dQ = scale dS K      dK = scale dS^T Q

dW is the gradient of returned weights, if there are any. One kernel sums dK and dV of a tile of keys over all queries
that see it, the other dQ of a tile of queries. Each adds in a fixed order, and computes the scores for itself, so that
there are 7 matrix products. One kernel that adds dQ with atomics has 5, and took 1.2 and 1.4 times as long at head
sizes 64 and 128 (H200). Both skip tiles without a visible pair, and the masks of tiles that are seen completely. The
kernel of dQ runs first, and computes delta.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.delta import launch_delta
from fastformer_kernels.attention.problem import (
    Problem,
    attention_kernel,
    exact_precision,
    is_exact,
    row_strides,
    rows_of,
    side_by_side,
    views,
    wider,
    with_aligned_rows,
)
from fastformer_kernels.attention.scores import (
    bias_of_head,
    key_tiles,
    load_bounds,
    load_lse,
    offset,
    place,
    real_columns,
    row_delta,
    score_gradient,
    seen_range,
    through_cap,
    weight_gradient,
)
from fastformer_kernels.host.launch import guard, launch, recorded
from fastformer_kernels.random import row_keys


@attention_kernel
def _attention_keys_values(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dweights_ptr,
    bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr, seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_dout_b, stride_dout_h, stride_dout_t, stride_lse_b, stride_lse_h,
    stride_dk_b, stride_dk_h, stride_dk_s, stride_dv_b, stride_dv_h, stride_dv_s,
    stride_dweights_b, stride_dweights_h, stride_dweights_t,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, tiles, together, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DWEIGHTS: tl.constexpr,
    STRAIGHT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one tile of keys of one key head; scores are transposed, `[BLOCK_S, BLOCK_T]`."""
    heads = H // GROUP
    tile, head = place(tiles, together)  # with causality the first tiles of keys are the longest
    b, hk = head // heads, head % heads
    q_base, last_query, k_base, first_key, last_key, shift, _ = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
    masked_rows = T if MASK < 3 else last_query
    first = tile * BLOCK_S
    end_column = last_key if PACKED else S
    if first >= end_column:
        return
    columns, steps = first + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_T)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    wide = columns.to(tl.int64)[:, None]
    key_mask_ptr += offset(b, 1, stride_key_mask_b)
    real = real_columns(columns, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]
    k_ptr += offset(b, ALIGN, stride_k_b) + offset(hk, ALIGN, stride_k_h) + offset(k_base, ALIGN, stride_k_s)
    v_ptr += offset(b, ALIGN, stride_v_b) + offset(hk, ALIGN, stride_v_h) + offset(k_base, ALIGN, stride_v_s)
    k = tl.load(k_ptr + wide * stride_k_s * ALIGN + dims[None, :], mask=real & in_head, other=0.0)
    v = tl.load(v_ptr + wide * stride_v_s * ALIGN + v_dims[None, :], mask=real & in_value, other=0.0)
    dk = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    dv = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)

    # For keys, left and right of the window are swapped. Gradients of padded keys are set to 0 at the end; no mask is
    # read for them.
    spread: tl.constexpr = not STRAIGHT and (K > 128 or V > 128 or (PRECISION == "tf32" and (K > 64 or V > 64)))
    low, high = seen_range(columns, 0, last_query, -shift, right, left, HAS_RIGHT, HAS_LEFT)
    if MASK != 0:
        real_key = real_columns(columns, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)
        low = tl.where(real_key, low, 2147483647)
    begin, full_begin, full_end, end = key_tiles(
        first, first + BLOCK_S - 1, 0, last_query, -shift, right, left, first * 0,
        HAS_RIGHT, HAS_LEFT, MASK != 0, BLOCK_T,
    )  # fmt: skip
    end = tl.where((first >= last_key) | (first + BLOCK_S <= first_key), begin, end)  # a tile of padding sees nothing
    for group in tl.range(0, GROUP):
        h = hk * GROUP + group
        q_head = q_ptr + offset(b, ALIGN, stride_q_b) + offset(h, ALIGN, stride_q_h) + offset(q_base, ALIGN, stride_q_t)
        dout_head = (
            dout_ptr
            + offset(b, ALIGN, stride_dout_b)
            + offset(h, ALIGN, stride_dout_h)
            + offset(q_base, ALIGN, stride_dout_t)
        )
        lse_head = lse_ptr + offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base
        delta_head = delta_ptr + offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base
        dweights_head = dweights_ptr + offset(b, 1, stride_dweights_b) + offset(h, 1, stride_dweights_h)
        mask_head = mask_ptr + offset(b, 1, stride_mask_b) + offset(h, 1, stride_mask_h)
        bias_head = bias_of_head(bias_ptr, h, stride_bias_h, shift)
        for j in tl.range(begin, end):
            rows = j * BLOCK_T + steps
            wide_rows = rows.to(tl.int64)[:, None]
            real_rows = (rows < last_query)[:, None]
            q = tl.load(q_head + wide_rows * stride_q_t * ALIGN + dims[None, :], mask=real_rows & in_head, other=0.0)
            dout = tl.load(
                dout_head + wide_rows * stride_dout_t * ALIGN + v_dims[None, :], mask=real_rows & in_value, other=0.0
            )
            lse, logarithm = load_lse(lse_head, second_part, rows, last_query, MASK)
            delta = tl.load(delta_head + rows, mask=rows < last_query, other=0.0)
            dots = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=tl.float32)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION, out_dtype=tl.float32)
            if HAS_DWEIGHTS:
                dp += weight_gradient(dweights_head, stride_dweights_t, rows[None, :], columns[:, None], T, last_key)
            keys = row_keys(tl.load(seed_ptr), rows, b * H + h) if HAS_DROPOUT else rows
            dropped_p, ds = score_gradient(
                dots, dp, lse[None, :], logarithm[None, :], delta[None, :], rows[None, :], low[:, None], high[:, None],
                (j < full_begin) | (j >= full_end), rows[None, :], columns[:, None],
                keys[None, :], key_mask_ptr, mask_head, stride_mask_t, stride_mask_s, bias_head, masked_rows,
                last_key, scale, softcap, threshold, keep_scale,
                HAS_RIGHT or MASK != 0, HAS_LEFT or MASK != 0 or spread, spread, STRAIGHT, False,
                MASK, HAS_SOFTCAP, HAS_DROPOUT,
            )  # fmt: skip
            ds = through_cap(ds, dots, scale, softcap, HAS_SOFTCAP)
            dv = tl.dot(dropped_p.to(dout.dtype), dout, dv, input_precision=PRECISION, out_dtype=tl.float32)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=tl.float32)
    dk_ptr += offset(b, ALIGN, stride_dk_b) + offset(hk, ALIGN, stride_dk_h) + offset(k_base, ALIGN, stride_dk_s)
    if V == K:  # dv has dk's strides: with strides of its own, fp32 at head size 128 spilled 8 bytes (sm_90)
        stride_dv_b, stride_dv_h, stride_dv_s = stride_dk_b, stride_dk_h, stride_dk_s
    dv_ptr += offset(b, ALIGN, stride_dv_b) + offset(hk, ALIGN, stride_dv_h) + offset(k_base, ALIGN, stride_dv_s)
    written = (columns < end_column)[:, None]
    dk = tl.where(real & in_head, dk * scale, 0.0)
    tl.store(dk_ptr + wide * stride_dk_s * ALIGN + dims[None, :], dk, mask=written & in_head)
    dv = tl.where(real & in_value, dv * keep_scale, 0.0)
    tl.store(dv_ptr + wide * stride_dv_s * ALIGN + v_dims[None, :], dv, mask=written & in_value)


@attention_kernel
def _attention_queries(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, out_ptr, added_ptr, dq_ptr, dweights_ptr,
    bounds_ptr, key_mask_ptr, mask_ptr, bias_ptr, seed_ptr,
    stride_q_b, stride_q_h, stride_q_t, stride_k_b, stride_k_h, stride_k_s, stride_v_b, stride_v_h, stride_v_s,
    stride_dout_b, stride_dout_h, stride_dout_t, stride_lse_b, stride_lse_h, stride_out_b, stride_out_h, stride_out_t,
    stride_dq_b, stride_dq_h, stride_dq_t, stride_dweights_b, stride_dweights_h, stride_dweights_t,
    stride_key_mask_b, stride_mask_b, stride_mask_h, stride_mask_t, stride_mask_s, stride_bias_h,
    second_part, T, S, tiles, together, shift, left, right, scale, softcap, threshold, keep_scale,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr,
    HAS_BOUNDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_DWEIGHTS: tl.constexpr,
    OWN_DELTA: tl.constexpr, STRAIGHT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one tile of queries `[BLOCK_T]` of one head, and with OWN_DELTA their delta."""
    rank, head = place(tiles, together)
    tile, b, h = tiles - 1 - rank, head // H, head % H  # with causality the last tiles are the longest
    q_base, last_query, k_base, first_key, last_key, shift, gaps = load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS)
    first_row = tile * BLOCK_T
    end_row = last_query if PACKED else T
    if first_row >= end_row:
        return
    rows, steps = first_row + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S)
    dims, v_dims = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_head, in_value = dims[None, :] < K, v_dims[None, :] < V
    wide = rows.to(tl.int64)[:, None]
    real = (rows < last_query)[:, None]
    q_ptr += offset(b, ALIGN, stride_q_b) + offset(h, ALIGN, stride_q_h) + offset(q_base, ALIGN, stride_q_t)
    dout_ptr += offset(b, ALIGN, stride_dout_b) + offset(h, ALIGN, stride_dout_h) + offset(q_base, ALIGN, stride_dout_t)
    k_ptr += offset(b, ALIGN, stride_k_b) + offset(h // GROUP, ALIGN, stride_k_h) + offset(k_base, ALIGN, stride_k_s)
    v_ptr += offset(b, ALIGN, stride_v_b) + offset(h // GROUP, ALIGN, stride_v_h) + offset(k_base, ALIGN, stride_v_s)
    row_base = offset(b, 1, stride_lse_b) + offset(h, 1, stride_lse_h) + q_base
    key_mask_ptr += offset(b, 1, stride_key_mask_b)
    mask_ptr += offset(b, 1, stride_mask_b) + offset(h, 1, stride_mask_h)
    bias_ptr = bias_of_head(bias_ptr, h, stride_bias_h, shift)
    masked_rows = T if MASK < 3 else last_query
    dweights_ptr += offset(b, 1, stride_dweights_b) + offset(h, 1, stride_dweights_h)
    q = tl.load(q_ptr + wide * stride_q_t * ALIGN + dims[None, :], mask=real & in_head, other=0.0)
    dout = tl.load(dout_ptr + wide * stride_dout_t * ALIGN + v_dims[None, :], mask=real & in_value, other=0.0)
    lse, logarithm = load_lse(lse_ptr + row_base, second_part, rows, last_query, MASK)
    if OWN_DELTA:
        out_ptr += offset(b, ALIGN, stride_out_b) + offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)
        out = tl.load(out_ptr + wide * stride_out_t * ALIGN + v_dims[None, :], mask=real & in_value, other=0.0)
        delta = row_delta(out, dout, added_ptr + row_base, rows, last_query, HAS_DWEIGHTS)
        tl.store(delta_ptr + row_base + rows, delta, mask=rows < end_row)
    else:
        delta = tl.load(delta_ptr + row_base + rows, mask=rows < last_query, other=0.0)
    dq = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    keys = row_keys(tl.load(seed_ptr), rows, b * H + h) if HAS_DROPOUT else rows
    low, high = seen_range(rows, first_key, last_key, shift, left, right, HAS_LEFT, HAS_RIGHT)
    begin, full_begin, full_end, end = key_tiles(
        first_row, tl.minimum(first_row + BLOCK_T, last_query) - 1, first_key, last_key, shift, left, right, gaps,
        HAS_LEFT, HAS_RIGHT, MASK != 0, BLOCK_S,
    )  # fmt: skip
    end = tl.where(first_row < last_query, end, begin)
    spread: tl.constexpr = not STRAIGHT and BLOCK_T < 128 and (K > 128 or V > 128)
    for j in tl.range(begin, end):
        columns = j * BLOCK_S + steps
        wide_columns = columns.to(tl.int64)[:, None]
        real_keys = real_columns(columns, first_key, last_key, key_mask_ptr, HAS_KEY_MASK)[:, None]
        k = tl.load(k_ptr + wide_columns * stride_k_s * ALIGN + dims[None, :], mask=real_keys & in_head, other=0.0)
        v = tl.load(v_ptr + wide_columns * stride_v_s * ALIGN + v_dims[None, :], mask=real_keys & in_value, other=0.0)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=tl.float32)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION, out_dtype=tl.float32)
        if HAS_DWEIGHTS:
            dp += weight_gradient(dweights_ptr, stride_dweights_t, rows[:, None], columns[None, :], T, last_key)
        _kept, ds = score_gradient(
            dots, dp, lse[:, None], logarithm[:, None], delta[:, None], columns[None, :], low[:, None], high[:, None],
            (j < full_begin) | (j >= full_end), rows[:, None], columns[None, :], keys[:, None],
            key_mask_ptr, mask_ptr, stride_mask_t, stride_mask_s, bias_ptr, masked_rows, last_key, scale, softcap,
            threshold, keep_scale,
            HAS_LEFT, True, spread, STRAIGHT, HAS_KEY_MASK, MASK, HAS_SOFTCAP, HAS_DROPOUT,
        )  # fmt: skip
        ds = through_cap(ds, dots, scale, softcap, HAS_SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=tl.float32)
    dq_ptr += offset(b, ALIGN, stride_dq_b) + offset(h, ALIGN, stride_dq_h) + offset(q_base, ALIGN, stride_dq_t)
    written = (rows < end_row)[:, None] & in_head
    dq = tl.where(real & in_head, dq * scale, 0.0)
    tl.store(dq_ptr + wide * stride_dq_t * ALIGN + dims[None, :], dq, mask=written)


def _like(x: Tensor) -> Tensor:
    """Return an empty tensor of x's shape; dense ones are laid out as `[B, T, H, K]`, as projections make them."""
    if x.dim() == 3:
        return recorded(x.new_empty(x.shape))
    return recorded(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2))


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    dweights: Tensor | None,
    wants_q: bool,
    wants_keys: bool,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, each of its input's shape and dtype, empty if not needed; and delta.

    The kernel of dQ computes delta before the kernel of dK and dV reads it; without it, a separate kernel does.

    Args:
        dout: of out's shape.
        q, k, v, arguments: as in forward.
        out, lse: as forward returned them.
        added: rowsum(weights * dweights), fp32 `[B, H, T]`, where weights were returned.
        dweights: the gradient of returned weights `[B, H, T, S]`, or None.
        wants_q, wants_keys: whether to compute the gradient of q, and the gradients of k and v.
    """
    problem = Problem.of(*arguments)
    B, H, T, S = problem.sizes(q)
    wide = wider(q, v)
    dq, dk, dv = (
        _like(x) if needed else recorded(x.new_empty(0))
        for x, needed in ((q, wants_q), (k, wants_keys), (v, wants_keys))
    )
    delta = recorded(lse.new_empty(rows_of(q)))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_()
    gradients = [x for x, needed in ((dq, wants_q), (dk, wants_keys), (dv, wants_keys)) if needed]
    if not gradients:  # delta alone, for the gradient of a mask
        align, (dout_view, out_view) = views(dout, out)
        with guard(q):
            launch_delta(delta, out_view, dout_view, added, align, problem, q)
        return dq, dk, dv, delta
    align, (q_view, k_view, v_view, dout_view, out_view, *gradient_views) = views(q, k, v, dout, out, *gradients)
    dq_strides = gradient_views[0].strides
    # In fp32 a tile is loaded asynchronously even where the number of keys is odd; 16 bits would be loaded one by one.
    dweights = None if dweights is None else with_aligned_rows(dweights.float())
    inputs = (q_view.data, k_view.data, v_view.data, dout_view.data, lse, delta)
    looked_up = (q if dweights is None else dweights, *problem.pointers(q))
    input_strides = (*q_view.strides, *k_view.strides, *v_view.strides, *dout_view.strides, *row_strides(lse, q))
    mask_strides = ((0, 0, 0) if dweights is None else dweights.stride()[:3]) + problem.mask_strides((B, H, T, S))
    scalars = problem.scalars()
    constants = {**problem.switches(q, k, v), "ALIGN": align, "HAS_DWEIGHTS": dweights is not None}
    constants["STRAIGHT"] = is_exact(wide)
    if is_exact(wide):
        constants["PRECISION"] = exact_precision(wide)
    features = ["heavy"] * (dweights is not None)
    row = (q.shape[-1] + v.shape[-1]) * q.element_size()  # bytes of one of q and dout, and one of k and v
    with guard(q):
        # In fp32, the kernel of dQ has no registers left for delta; and its multiply-adds round the products of a row
        # (see `_attention_delta`), which are exact in 16 bits.
        own_delta = wants_q and q.dtype != torch.float32
        if not own_delta:
            launch_delta(delta, out_view, dout_view, added, align, problem, q)
        if wants_q:
            tile = problem.tile("queries", wide, *features)
            tiles = -(-T // tile["BLOCK_T"])
            together = side_by_side(q, problem, B * H, S * row * k.shape[1] // H)
            grid, sizes = (B * H * tiles,), (lse.numel() // 2, T, S, tiles, together)
            tensors = (*inputs, out_view.data, lse if added is None else added.contiguous(), dq, *looked_up)
            strides = (*input_strides, *out_view.strides, *dq_strides, *mask_strides)
            # With the branch, Triton 3.7 puts no fence between the store that transposes the keys and tf32's third
            # product, which reads them.
            constants_of_dq = {**constants, "OWN_DELTA": own_delta, "STRAIGHT": q.dtype == torch.float32}
            launch(_attention_queries, grid, *tensors, *strides, *sizes, *scalars, **constants_of_dq, **tile)
        if wants_keys:
            tile = problem.tile("keys", wide, *features)
            tiles = -(-S // tile["BLOCK_S"])
            together = side_by_side(q, problem, B * k.shape[1], T * row * H // k.shape[1])
            grid, sizes = (B * k.shape[1] * tiles,), (lse.numel() // 2, T, S, tiles, together)
            tensors = (*inputs, dk, dv, *looked_up)
            dk_strides, dv_strides = gradient_views[-2].strides, gradient_views[-1].strides
            strides = (*input_strides, *dk_strides, *dv_strides, *mask_strides)
            launch(_attention_keys_values, grid, *tensors, *strides, *sizes, *scalars, **constants, **tile)
    return dq, dk, dv, delta
