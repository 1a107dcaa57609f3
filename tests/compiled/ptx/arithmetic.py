"""What PTX computes, on numpy arrays of bits: one element a thread, or one for all of them.

Integers wrap, conversions round as they say, fma rounds once. ex2 and rsqrt are approximations of a GPU, whose bits
NVIDIA does not publish: here they are rounded from more exact values.
"""

import numpy as np

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
UINT = {8: u8, 16: u16, 32: u32, 64: u64}
INT = {8: i8, 16: i16, 32: i32, 64: i64}


def const(bits, width):
    """Bits as an array of one element, which numpy spreads over all threads."""
    return np.array([bits & ((1 << width) - 1)], UINT[width])


def merge(mask, new, old):
    """A register of which only the threads of the mask are written."""
    return new if old is None else np.where(mask, new, old)


def flush(x):
    """Subnormal fp32 to zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < f32(1.1754943508222875e-38), np.copysign(f32(0), x), x)


# ---- 16-bit floats -------------------------------------------------------------------------------------------------


def bf16_to_f32(x):
    return (x.astype(u32) << u32(16)).view(f32)


def f32_to_bf16(x):
    bits = x.view(u32)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return np.where(np.isnan(x), u32(0x7FFF), rounded).astype(u16)


def f32_to_tf32(x):
    """Round to 10 bits after the point, halves away from zero; the other 13 bits are 0."""
    bits = x.view(u32)
    return np.where(np.isfinite(x), (bits + u32(0x1000)) & u32(0xFFFFE000), bits)


def f32_to_f16(x):
    return x.astype(f16).view(u16)


def f16_to_f32(x):
    return x.view(f16).astype(f32)


def f64_to_bf16(x):
    """By way of fp32 rounded to odd, so that there is one rounding only."""
    near = x.astype(f32)
    bits = near.view(u32)
    back = near.astype(f64)
    truncated = np.where(np.abs(back) > np.abs(x), bits - u32(1), bits)
    odd = np.where(back == x, bits, truncated | u32(1))
    return f32_to_bf16(np.where(np.isfinite(x), odd, bits).view(f32))


def widen(x, kind):
    return bf16_to_f32(x) if kind == "bf16" else f16_to_f32(x)


def narrow64(x, kind):
    return f64_to_bf16(x) if kind == "bf16" else x.astype(f16).view(u16)


def pack16(high, low):
    return (high.astype(u32) << u32(16)) | low.astype(u32)


def low16(x):
    return x.astype(u16)


def high16(x):
    return (x >> u32(16)).astype(u16)


def halves(function, kind, *args):
    """Apply a function on fp64 to both 16-bit halves."""
    parts = []
    for take in (high16, low16):
        parts.append(narrow64(function(*(widen(take(a), kind).astype(f64) for a in args)), kind))
    return pack16(*parts)


def single16(function, kind, *args):
    return narrow64(function(*(widen(a, kind).astype(f64) for a in args)), kind)


# ---- fp32 and fp64 -------------------------------------------------------------------------------------------------


def fma32(a, b, c):
    """a b + c in fp64, whose product is exact, then fp32; the sum is rounded to odd where it is not exact."""
    p = a.astype(f64) * b
    c = c.astype(f64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    if np.any(error != 0):
        bits = s.view(u64)
        even = (error != 0) & ((bits & u64(1)) == 0) & np.isfinite(s)
        up = (error > 0) == (s > 0)
        s = np.where(even, np.where(up, bits + u64(1), bits - u64(1)), bits).view(f64)
    return s.astype(f32)


def rsqrt(x):
    return (1.0 / np.sqrt(x.astype(f64))).astype(f32)


# ---- integers ------------------------------------------------------------------------------------------------------


def shl(a, n):
    width = 8 * a.itemsize
    n = n.astype(u32)
    return np.where(n >= u32(width), a.dtype.type(0), a << np.minimum(n, u32(width - 1)).astype(a.dtype))


def shr(a, n):
    width = 8 * a.itemsize
    n = n.astype(u32)
    shifted = a >> np.minimum(n, u32(width - 1)).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n >= u32(width), a.dtype.type(0), shifted)


def divide(a, b):
    """Signed, towards zero; by zero it gives -1."""
    zero = b == 0
    b = np.where(zero, a.dtype.type(1), b)
    q = a // b
    return np.where(zero, a.dtype.type(-1), q + ((q < 0) & (q * b != a)).astype(a.dtype))


def mulhi(a, b):
    return (a.astype(u64) * b.astype(u64) >> u64(32)).astype(u32)


def _ones(length, dtype):
    """As many bits as `length` says, from the lowest on."""
    return shl(np.ones(1, dtype), length) - dtype.type(1)


def bfe(a, pos, length):
    bits = a.view(UINT[8 * a.itemsize])
    pos, length = pos.astype(i64) & 255, length.astype(i64) & 255
    ones = _ones(length, bits.dtype)
    out = shr(bits, pos) & ones
    if a.dtype.kind == "i":
        top = np.minimum(pos + length - 1, 8 * a.itemsize - 1)
        sign = (shr(bits, top) & bits.dtype.type(1)).astype(bool) & (length > 0)
        out = np.where(sign, out | ~ones, out)
    return out.view(a.dtype)


def prmt(a, b, c):
    both = a.astype(u64) | (b.astype(u64) << u64(32))
    out = u32(0)
    for i in range(4):
        selector = (c >> u32(4 * i)) & u32(15)
        byte = (both >> ((selector & u32(7)) << u32(3)).astype(u64)) & u64(255)
        sign = np.where(byte & u64(128), u64(255), u64(0))
        out = out | (np.where(selector & u32(8), sign, byte).astype(u32) << u32(8 * i))
    return out
