"""What the backward kernels of attention need beside the log-sum-exp: delta = rowsum(out * dout) of each row."""

from typing import Any

import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import Problem, attends, row_strides, views
from fastformer_kernels.attention.scores import load_bounds, offset
from fastformer_kernels.host.launch import guard, launch, noted


@attends
def _attention_delta(
    out_ptr, dout_ptr, delta_ptr, bounds_ptr,
    stride_out_b, stride_out_h, stride_out_t, stride_dout_b, stride_dout_h, stride_dout_t,
    stride_delta_b, stride_delta_h, T, tiles,
    H: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout), 0 for padded queries: `[BLOCK_T]` rows of one head."""
    tile, b, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    q_base, last_query, _, _, _, _, _ = load_bounds(bounds_ptr, b, T, T, 0, HAS_BOUNDS)
    end_row = last_query if PACKED else T
    if tile * BLOCK_T >= end_row:
        return
    rows, dims = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    real = (rows < last_query)[:, None] & (dims[None, :] < K)
    wide = rows.to(tl.int64)[:, None]
    out_ptr += offset(b, ALIGN, stride_out_b) + offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)
    dout_ptr += offset(b, ALIGN, stride_dout_b) + offset(h, ALIGN, stride_dout_h) + offset(q_base, ALIGN, stride_dout_t)
    out = tl.load(out_ptr + wide * stride_out_t * ALIGN + dims[None, :], mask=real, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + wide * stride_dout_t * ALIGN + dims[None, :], mask=real, other=0.0).to(tl.float32)
    delta_ptr += offset(b, 1, stride_delta_b) + offset(h, 1, stride_delta_h) + q_base
    tl.store(delta_ptr + rows, tl.sum(out * dout, 1), mask=rows < end_row)


def delta(out: Tensor, dout: Tensor, lse: Tensor, *settings: Any) -> Tensor:
    """Compute rowsum(out * dout), fp32 `[B, H, T]` or packed `[H, T]`; arguments as in `backward`."""
    problem = Problem(*settings)
    B, H, T, _ = problem.sizes(out)
    result = noted(lse.new_empty(lse.shape[-3:]))
    if out.numel() == 0:
        return result.zero_()
    align, (out_view, dout_view) = views(out, dout)
    tile = {"BLOCK_T": 64, "num_warps": 4}
    tiles = -(-T // tile["BLOCK_T"])
    tensors = (out_view.data, dout_view.data, result, out if problem.bounds is None else problem.bounds)
    strides = (*out_view.strides, *dout_view.strides, *row_strides(result))
    constants = {**problem.head_switches(out), "PACKED": out.dim() == 3, "ALIGN": align}
    with guard(out):
        launch(_attention_delta, (B * H * tiles,), *tensors, *strides, T, tiles, **constants, **tile)
    return result
