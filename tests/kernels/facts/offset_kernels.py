"""The ways in which an offset overflows beyond 2^31 elements."""

import torch
import triton
import triton.language as tl


@triton.jit
def bad_late_cast(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(x_ptr + (tl.program_id(0) * stride).to(tl.int64) + tl.arange(0, BLOCK), 0.0)


@triton.jit
def bad_rows(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + rows[:, None] * stride + tl.arange(0, BLOCK)[None, :], 0.0, mask=rows[:, None] < M)


@triton.jit
def bad_width(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], 0.0)


@triton.jit
def bad_loop(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    for row in range(tl.program_id(0), M, 8):
        tl.store(x_ptr + row * stride + tl.arange(0, BLOCK), 0.0)


@triton.jit
def bad_carried(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    offset = tl.program_id(0) * stride
    for _ in range(0, M):
        total += tl.load(x_ptr + offset + tl.arange(0, BLOCK))
        offset += BLOCK
    tl.store(x_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def bad_loaded(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.load(x_ptr + tl.program_id(0)).to(tl.int32)
    tl.store(x_ptr + start * WIDTH + tl.arange(0, BLOCK), 0.0)


@triton.jit
def _row(x_ptr, row, stride):
    return x_ptr + row * stride


@triton.jit
def bad_helper(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    if row < M:
        tl.store(_row(x_ptr, row, stride) + tl.arange(0, BLOCK), 0.0)


@triton.jit
def bad_branch(x_ptr, stride, M, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    offset = tl.program_id(0)
    if M > 7:
        offset = offset * stride
    tl.store(x_ptr + offset + tl.arange(0, BLOCK), 0.0)


def offset_cases():
    for name, kernel in list(globals().items()):
        if name.startswith("bad_"):
            yield name, lambda kernel=kernel: kernel[(1,)](torch.empty(1, device="meta"), 1000, 1001, 16, 32)
