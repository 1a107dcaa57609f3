"""delta = rowsum(out * dout), which backward needs for each row, if the kernel of dQ does not compute it.

The kernel of dQ loads a tile of dout anyway, so that it saves a launch and a read of dout.
"""

import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention.problem import Problem, View, attention_kernel, head_size, row_strides
from fastformer_kernels.attention.scores import load_bounds, offset
from fastformer_kernels.host.launch import launch


@attention_kernel
def _attention_delta(
    out_ptr, dout_ptr, delta_ptr, added_ptr, bounds_ptr,
    stride_out_b, stride_out_h, stride_out_t, stride_dout_b, stride_dout_h, stride_dout_t,
    stride_delta_b, stride_delta_h, T, tiles,
    H: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_ADDED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute delta of `[BLOCK_T]` rows of one head, 0 for padded queries."""
    tile, b, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    q_base, last_query, _, _, _, _, _ = load_bounds(bounds_ptr, b, T, T, 0, HAS_BOUNDS)
    end_row = last_query if PACKED else T
    if tile * BLOCK_T >= end_row:
        return
    rows, dims = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_V)
    real = (rows < last_query)[:, None] & (dims[None, :] < V)
    wide = rows.to(tl.int64)[:, None]
    out_ptr += offset(b, ALIGN, stride_out_b) + offset(h, ALIGN, stride_out_h) + offset(q_base, ALIGN, stride_out_t)
    dout_ptr += offset(b, ALIGN, stride_dout_b) + offset(h, ALIGN, stride_dout_h) + offset(q_base, ALIGN, stride_dout_t)
    out = tl.load(out_ptr + wide * stride_out_t * ALIGN + dims[None, :], mask=real, other=0.0)
    dout = tl.load(dout_ptr + wide * stride_dout_t * ALIGN + dims[None, :], mask=real, other=0.0)
    row_base = offset(b, 1, stride_delta_b) + offset(h, 1, stride_delta_h) + q_base
    # Without the selection, a thread adds its product to that of another thread in a multiply-add, which rounds one of
    # them only. Then threads of a row have different sums, and it is undefined which of these is stored.
    products = tl.where(real, out.to(tl.float32) * dout.to(tl.float32), 0.0)
    delta = tl.sum(products, 1)
    if HAS_ADDED:
        delta += tl.load(added_ptr + row_base + rows, mask=rows < last_query, other=0.0)
    tl.store(delta_ptr + row_base + rows, delta, mask=rows < end_row)


def launch_delta(
    delta: Tensor, out: View, dout: View, added: Tensor | None, align: int, problem: Problem, q: Tensor
) -> None:
    """Fill delta, fp32 `[B, H, T]` or packed `[H, T]`; arguments as in `backward`."""
    B, H, T, _ = problem.sizes(q)
    wide_rows = out.data.shape[-1] * out.data.element_size() > 512  # 64 of them spill 32 bytes on sm_86
    tile = {"BLOCK_T": 32 if wide_rows else 64, "num_warps": 4}
    tiles = -(-T // tile["BLOCK_T"])
    rows = (delta, delta if added is None else added.contiguous())
    tensors = (out.data, dout.data, *rows, q if problem.bounds is None else problem.bounds)
    strides = (*out.strides, *dout.strides, *row_strides(delta, q))
    constants = {**problem.head_switches(q), **head_size("V", out.data, out.data), "ALIGN": align}
    constants |= {"PACKED": q.dim() == 3, "HAS_ADDED": added is not None}
    launch(_attention_delta, (B * H * tiles,), *tensors, *strides, T, tiles, **constants, **tile)
