"""Where the sequences of an attention call lie, worked out on the device: nothing waits for it on the host.

Lengths, a bool key mask or the offsets of packed sequences become one int32 `[B, 8]` tensor that every attention kernel
reads; its columns are named in `attention_tiles`. A key mask is reduced to its first and last real key, for skipping
tiles of padding on the left and on the right, and a flag for gaps in between.
"""

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.launch import as_bytes, guard, kernel, launch, noted

BLOCK = tl.constexpr(1024)


@kernel(anywhere=["query_lengths_ptr", "key_lengths_ptr", "key_mask_ptr"])
def _attention_bounds(
    bounds_ptr, query_lengths_ptr, key_lengths_ptr, key_mask_ptr, T, S,
    PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):  # fmt: skip
    """Fill one row; where packed, the pointers of the lengths are those of offsets."""
    b = tl.program_id(0)
    q_base, k_base, queries, keys = b * 0, b * 0, b * 0 + T, b * 0 + S
    if PACKED:
        q_base = tl.load(query_lengths_ptr + b).to(tl.int32)
        k_base = tl.load(key_lengths_ptr + b).to(tl.int32)
        queries = tl.load(query_lengths_ptr + b + 1).to(tl.int32) - q_base
        keys = tl.load(key_lengths_ptr + b + 1).to(tl.int32) - k_base
    else:
        # Lengths on a GPU are not checked on the host, which would wait for them; no kernel may leave its tensor.
        if HAS_QUERY_LENGTHS:
            queries = tl.minimum(tl.maximum(tl.load(query_lengths_ptr + b).to(tl.int32), 0), T)
        if HAS_KEY_LENGTHS:
            keys = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + b).to(tl.int32), 0), S)
    first, last, gaps = b * 0, keys, b * 0
    if HAS_KEY_MASK:
        row = key_mask_ptr + b.to(tl.int64) * S
        low = tl.full((BLOCK,), 2147483647, tl.int32)
        high = tl.zeros((BLOCK,), tl.int32)
        seen = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, S, BLOCK):
            at = start + tl.arange(0, BLOCK)
            real = tl.load(row + at, mask=at < keys, other=0) != 0
            low = tl.where(real, tl.minimum(low, at), low)
            high = tl.where(real, tl.maximum(high, at + 1), high)
            seen += real.to(tl.int32)
        last = tl.max(high, 0)
        first = tl.minimum(tl.min(low, 0), last)
        gaps = (last - first - tl.sum(seen, 0) != 0).to(tl.int32)
    shift = keys - queries if BOTTOM_RIGHT else b * 0
    to = bounds_ptr + b * 8
    tl.store(to, q_base)
    tl.store(to + 1, queries)
    tl.store(to + 2, k_base)
    tl.store(to + 3, first)
    tl.store(to + 4, last)
    tl.store(to + 5, shift)
    tl.store(to + 6, gaps)
    tl.store(to + 7, b * 0)


def bounds(
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    key_mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    packed: bool,
    bottom_right: bool,
    like: Tensor,
) -> Tensor:
    """Return the bounds, int32 `[B, 8]`, on the device of `like`.

    Args:
        query_lengths, key_lengths: integers `[B]`, or where packed the offsets `[B + 1]`.
        key_mask: bool `[B, S]`, True = a real key.
        batch, queries, keys: B, T and S.
        packed: whether the lengths are offsets.
        bottom_right: whether the last query of a sequence meets its last key.
        like: any tensor on the device.
    """
    result = noted(like.new_empty((batch, 8), dtype=torch.int32))
    if batch == 0:
        return result
    lengths = [like if x is None else x.contiguous() for x in (query_lengths, key_lengths)]
    mask = like if key_mask is None else as_bytes(key_mask.contiguous())
    constants = (packed, bottom_right, query_lengths is not None, key_lengths is not None, key_mask is not None)
    with guard(like):
        launch(_attention_bounds, (batch,), result, *lengths, mask, queries, keys, *constants, num_warps=4)
    return result
