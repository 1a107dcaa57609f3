"""What the budget must catch: spills, too much shared memory, work done twice, bad wgmma, what does not compile."""

import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + start + k[:, None])
        total = tl.dot(a, b, total, out_dtype=tl.float32)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


SCALE = tl.constexpr(0.5)


@triton.jit
def scaled(scores):
    return SCALE * scores


@triton.jit
def attention_weights(scores):
    return tl.exp2(scaled(scores))


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, S, BLOCK: tl.constexpr, D: tl.constexpr):
    """Products whose accumulators, 2 x [BLOCK, 128], are 256 registers a thread with BLOCK 128 and 4 warps."""
    m, d = tl.arange(0, BLOCK), tl.arange(0, D)
    q = tl.load(q_ptr + m[:, None] * D + d[None, :])
    total = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, S, 128):
        n = start + tl.arange(0, 128)
        k = tl.load(k_ptr + n[None, :] * D + d[:, None])
        p = attention_weights(tl.dot(q, k, out_dtype=tl.float32))
        v = tl.load(v_ptr + n[:, None] * D + d[None, :])
        total = tl.dot(p.to(v.dtype), v, total, out_dtype=tl.float32)
    tl.store(out_ptr + m[:, None] * D + d[None, :], total)


@triton.jit
def centred(x):
    return x - tl.sum(x)


@triton.jit
def normalise_kernel(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, centred(x))


def _meta(dtype=torch.bfloat16):
    return torch.empty(16, dtype=dtype, device="meta")


def _product(m, n, k, num_stages=2):
    out = _meta(torch.float32)
    return lambda: product_kernel[(1,)](_meta(), _meta(), out, 512, m, n, k, num_warps=4, num_stages=num_stages)


def _attention(block, num_warps=4):
    out, options = _meta(torch.float32), {"num_warps": num_warps, "num_stages": 2}
    return lambda: attention_kernel[(1,)](_meta(), _meta(), _meta(), out, 512, block, 128, **options)


def _normalise(n):
    x, out = _meta(torch.float32), _meta(torch.float32)
    return lambda: normalise_kernel[(1,)](x, out, n, num_warps=1)


def _raise():
    raise ValueError("no such tile")


def faults_cases():
    yield "sound", _product(64, 64, 64)
    yield "the same again", _product(64, 64, 64)
    yield "sound attention", _attention(64)
    yield "sound sum", _normalise(1 << 10)
    yield "serialised", _attention(128)
    yield "replicated", _attention(64, num_warps=8)
    yield "too few rows for wgmma", _product(32, 64, 64)
    yield "shared memory", _product(64, 64, 256, num_stages=5)
    yield "spills", _normalise(1 << 14)
    yield "no power of two", _normalise(100)
    yield "raises", _raise
