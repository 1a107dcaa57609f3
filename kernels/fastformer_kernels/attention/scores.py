"""Device functions of all attention kernels: bounds of a sequence, visible keys of a query, scores, softmax.

Scores are kept in units of log2, so that `exp2` needs no multiplication. A query row t sees the keys s of
[first_key, last_key) with t + shift - left <= s <= t + shift + right; other limits (a key mask with gaps, an
arbitrary mask) are read tile by tile. Rows and columns have shapes `[BLOCK_T, 1]` and `[1, BLOCK_S]`, or the other
way round if a kernel works with transposed scores.
"""

import triton
import triton.language as tl

from fastformer_kernels.constants import LOG2E, LOWEST
from fastformer_kernels.random import keep

# The columns of the bounds tensor, int32 [B, 8]; see `problem.bounds`.
Q_BASE = tl.constexpr(0)  # row of the first query of the sequence
LAST_QUERY = tl.constexpr(1)  # queries from here on are padding
K_BASE = tl.constexpr(2)  # row of the first key of the sequence
FIRST_KEY = tl.constexpr(3)  # keys before are padding
LAST_KEY = tl.constexpr(4)  # keys from here on are padding
SHIFT = tl.constexpr(5)  # of the diagonal
GAPS = tl.constexpr(6)  # not 0: some keys in between are padding too


@triton.jit
def offset(index, size: tl.constexpr, stride):
    """Return index * size * stride in 64 bits; index is a scalar, in interpreted loops a Python number."""
    return tl.cast(index, tl.int64) * size * stride


@triton.jit
def place(tiles, together):
    """Return (rank, head) of this program: its tile is the one of rank `rank` in the order of its head's `tiles`.

    Heads are in groups of `together`: all tiles of rank 0 of a group start first, then those of rank 1. The tile that
    takes longest should have rank 0, so that short tiles fill the end (`problem.side_by_side` has the figures).
    """
    pid, heads = tl.program_id(0), tl.num_programs(0) // tiles
    first = pid // (together * tiles) * together
    members = tl.minimum(together, heads - first)
    pid -= first * tiles
    return pid // members, first + pid % members


@triton.jit
def load_bounds(bounds_ptr, b, T, S, shift, HAS_BOUNDS: tl.constexpr):
    """Return (q_base, last_query, k_base, first_key, last_key, shift, gaps) of sequence b.

    Without bounds: all T queries and S keys, and the argument `shift`.
    """
    if HAS_BOUNDS:
        row = bounds_ptr + b * 8
        q_base, last_query, k_base = tl.load(row + Q_BASE), tl.load(row + LAST_QUERY), tl.load(row + K_BASE)
        first_key, last_key = tl.load(row + FIRST_KEY), tl.load(row + LAST_KEY)
        shift, gaps = tl.load(row + SHIFT), tl.load(row + GAPS)
    else:
        q_base, last_query, k_base, first_key, last_key, gaps = b * 0, b * 0 + T, b * 0, b * 0, b * 0 + S, b * 0
    return q_base, last_query, k_base, first_key, last_key, shift, gaps


@triton.jit
def key_tiles(
    first_row,
    last_row,
    first_key,
    last_key,
    shift,
    left,
    right,
    gaps,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return (begin, full_begin, full_end, end): the tiles of keys that are visible to rows first_row..last_row.

    Every key of tiles full_begin..full_end is visible to every one of these rows, so that they need no mask.
    """
    low, high, full_low, full_high = first_key, last_key, first_key, last_key
    if HAS_RIGHT:
        high = tl.minimum(high, last_row + shift + right + 1)
        full_high = tl.minimum(full_high, first_row + shift + right + 1)
    if HAS_LEFT:
        low = tl.maximum(low, first_row + shift - left)
        full_low = tl.maximum(full_low, last_row + shift - left)
    begin = tl.maximum(low, 0) // BLOCK_S
    end = tl.maximum(tl.cdiv(tl.maximum(high, 0), BLOCK_S), begin)
    if ALL_MASKED:
        full_begin = begin
        full_end = begin
    else:
        full_begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_low, 0), BLOCK_S), begin), end)
        full_end = tl.maximum(tl.minimum(tl.maximum(full_high, 0) // BLOCK_S, end), full_begin)
        full_end = tl.where(gaps != 0, full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def visible(
    rows,
    columns,
    first_key,
    last_key,
    shift,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Return, for each score of the tile, whether causality, window and bounds let the row attend to the key."""
    seen = (columns >= first_key) & (columns < last_key) & (rows >= 0)
    if HAS_RIGHT:
        seen = seen & (columns <= rows + shift + right)
    if HAS_LEFT:
        seen = seen & (columns >= rows + shift - left)
    return seen


@triton.jit
def real_columns(columns, first_key, last_key, key_mask_ptr, HAS_KEY_MASK: tl.constexpr):
    """Return which columns are not padding. Padding may hold NaN, and 0 * NaN is NaN, so it is never loaded."""
    real = (columns >= first_key) & (columns < last_key)
    if HAS_KEY_MASK:
        real = real & (tl.load(key_mask_ptr + columns, mask=real, other=0) != 0)
    return real


@triton.jit
def scores(dots, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return scale * dots in units of log2, with HAS_SOFTCAP capped smoothly to +-softcap (Gemma 2 report, 2024).

    HAS_SOFTCAP: 0 no, 1 yes, 2 yes, with fp32 accuracy.
    """
    if HAS_SOFTCAP:
        # tanh(x) = 2 / (1 + exp(-2 x)) - 1, which is -1 where the exponential overflows.
        tanh = 2.0 / (1.0 + tl.exp2(dots * (scale * (-2.0 * LOG2E) / softcap))) - 1.0
        if HAS_SOFTCAP == 2:
            # Near 0 the difference cancels, and the cap multiplies the error: 3e-6 for a cap of 50. So Taylor's series.
            x = dots * (scale / softcap)
            y = x * x
            series = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
            tanh = tl.where(y < 0.0625, series, tanh)
        return tanh * (softcap * LOG2E)
    else:
        return dots * (scale * LOG2E)


@triton.jit
def bias_of_head(bias_ptr, h, stride_bias_h, shift):
    """Return the address of head h's bias for distance 0; adding column - row gives that of any score."""
    return bias_ptr + offset(h, 1, stride_bias_h) + (stride_bias_h // 2 - shift)


@triton.jit
def _in_log2(value):
    """Return an additive mask or bias in units of log2.

    The lowest finite number must stay finite: torch gives a row of only that number the mean over all keys.
    """
    value = value.to(tl.float32)
    return tl.where(value == float("-inf"), value, tl.maximum(value, LOWEST / LOG2E) * LOG2E)


@triton.jit
def hide(
    s,
    seen,
    rows,
    columns,
    key_mask_ptr,
    mask_ptr,
    stride_mask_t,
    stride_mask_s,
    bias_ptr,
    T,
    last_key,
    HAS_KEY_MASK: tl.constexpr,
    MASK: tl.constexpr,
):
    """Apply all masks to a tile of scores: -inf where a query may not attend, plus the additive mask and the bias.

    MASK: 0 none, 1 bool (True = may attend), 2 additive; 3, 4, 5 the same with the bias. The pointers are of this
    sequence and head; that of the bias comes from `bias_of_head`. Neither mask nor bias is read for rows from T on:
    the number of the mask's rows, or with a bias the end of the sequence.
    """
    if HAS_KEY_MASK:
        seen = seen & (tl.load(key_mask_ptr + columns, mask=columns < last_key, other=0) != 0)
    if MASK % 3 != 0:
        where = mask_ptr + rows.to(tl.int64) * stride_mask_t + columns.to(tl.int64) * stride_mask_s
        value = tl.load(where, mask=seen & (rows < T), other=0)
        if MASK % 3 == 1:
            seen = seen & (value != 0)
        else:
            s += _in_log2(value)
    if MASK >= 3:
        s += _in_log2(tl.load(bias_ptr + (columns - rows), mask=seen & (rows < T), other=0))
    return tl.where(seen, s, float("-inf"))


@triton.jit
def fold(acc, total, peak, s, factor, v, keys, columns, threshold, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr):
    """Add one tile of scores `[BLOCK_T, BLOCK_S]` and its values to the running softmax of each row.

    Scores and peak times `factor`, which is positive, are in units of log2: multiplying here takes no extra
    instruction. `keys` (the random keys of the rows), columns and threshold are used only with HAS_DROPOUT.
    """
    new_peak = tl.maximum(peak, tl.max(s, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak * factor)  # a row that has seen nothing yet
    p = tl.exp2(s * factor - shift[:, None])
    fade = tl.exp2(peak * factor - shift)
    total = total * fade + tl.sum(p, 1)
    if HAS_DROPOUT:
        p = tl.where(keep(keys[:, None], columns[None, :], threshold), p, 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION, out_dtype=tl.float32)
    return acc, total, new_peak


@triton.jit
def sink(peak, sinks_ptr, h):
    """Return what the sink of head h, a key without a value, adds to the softmax's sum of rows with visible keys.

    It is +inf if the sink exceeds the peak by 128 or more, in units of log2: all other weights are then 0.
    """
    return tl.exp2(tl.load(sinks_ptr + h).to(tl.float32) * LOG2E - peak)


@triton.jit
def load_lse(lse_ptr, second_part, rows, last_query, MASK: tl.constexpr):
    """Return the log-sum-exp of rows, +inf beyond the last query, and its second part, used from MASK 2 on."""
    high = tl.load(lse_ptr + rows, mask=rows < last_query, other=float("inf"))
    low = high
    if MASK >= 2:
        low = tl.load(lse_ptr + second_part + rows, mask=rows < last_query, other=0.0)
    return high, low


@triton.jit
def exponentials(s, lse, logarithm, MASK: tl.constexpr):
    """Return exp2(s - lse), the weights before dropout."""
    if MASK >= 2:
        return tl.exp2(s - lse - logarithm)
    else:
        return tl.exp2(s - lse)


@triton.jit
def row_delta(out, dout, added_ptr, rows, last_query, HAS_ADDED: tl.constexpr):
    """Return delta = rowsum(out * dout) of a tile of rows, plus `added` = rowsum(weights * dweights)."""
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_ADDED:
        delta += tl.load(added_ptr + rows, mask=rows < last_query, other=0.0)
    return delta


@triton.jit
def weight_gradient(dweights_ptr, stride_dweights_t, rows, columns, T, last_key):
    """Load a tile of dW, fp32, where weights were returned."""
    where = dweights_ptr + rows.to(tl.int64) * stride_dweights_t + columns
    return tl.load(where, mask=(rows < T) & (columns < last_key), other=0.0)


@triton.jit
def seen_range(at, first, last, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Return (low, high) for each position in `at`: it sees the positions [low, high) of [first, last).

    Each side then takes one comparison a score. For transposed scores the arguments are -shift, right and left.
    """
    low, high = at * 0 + first, at * 0 + last
    if HAS_LEFT:
        low = tl.maximum(low, at + shift - left)
    if HAS_RIGHT:
        high = tl.minimum(high, at + shift + right + 1)
    return low, high


@triton.jit
def within(at, low, high, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr):
    """Return low <= at < high, with only the bounds that HAS_LOW and HAS_HIGH name."""
    seen = at < high if HAS_HIGH else at >= low
    return seen & (at >= low) if HAS_LOW and HAS_HIGH else seen


@triton.jit
def score_gradient(
    dots, dp, lse, logarithm, delta, at, low, high, masked, rows, columns, keys, key_mask_ptr, mask_ptr,
    stride_mask_t, stride_mask_s, bias_ptr, T, last_key, scale, softcap, threshold, keep_scale,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, SPREAD: tl.constexpr, STRAIGHT: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr, MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the weights after dropout, without its scale, and the gradient of the (capped) scores, of dots' shape.

    Args:
        at, low, high, HAS_LOW, HAS_HIGH: as `within` takes them.
        masked: whether the tile needs a mask at all.
        STRAIGHT: masks before the exponential, without a branch, which spilled up to 40 bytes in fp32 on plain cores.
        SPREAD: whether dp passes through the branch, too: for tiles of fewer than 16 rows a warp, see below.

    Weights are hidden after the exponential, so that scale and log-sum-exp are one multiply-add, and in a branch that
    whole tiles skip. That took dQ's loop at head size 64 from 1,816 warp instructions for 4,096 scores, a third of them
    masks, to 1,068 on whole tiles (128 x 128, 8 warps, sm_90, compiled). If a product feeds another one directly,
    Triton lays all warps along the rows of its result, and 8 of them compute 64 rows twice. The result of a branch has
    the layout of any other product.
    """
    s = scores(dots, scale, softcap, HAS_SOFTCAP)
    if MASK != 0 and SPREAD:
        if masked:  # always true: only for Triton's layout
            seen = within(at, low, high, HAS_LOW, HAS_HIGH)
            dp = tl.where(seen, dp, 0.0)
            s = hide(
                s, seen, rows, columns, key_mask_ptr, mask_ptr, stride_mask_t, stride_mask_s, bias_ptr, T, last_key,
                HAS_KEY_MASK, MASK,
            )  # fmt: skip
    elif MASK != 0 or STRAIGHT:
        seen = within(at, low, high, HAS_LOW, HAS_HIGH)
        s = hide(
            s, seen, rows, columns, key_mask_ptr, mask_ptr, stride_mask_t, stride_mask_s, bias_ptr, T, last_key,
            HAS_KEY_MASK, MASK,
        )  # fmt: skip
    p = exponentials(s, lse, logarithm, MASK)
    if MASK == 0 and not STRAIGHT and (HAS_LOW or HAS_HIGH):
        if masked:
            seen = within(at, low, high, HAS_LOW, HAS_HIGH)
            if HAS_KEY_MASK:
                seen = seen & real_columns(columns, 0, last_key, key_mask_ptr, True)
            p = tl.where(seen, p, 0.0)
            if SPREAD:
                dp = tl.where(seen, dp, 0.0)  # only for Triton's layout
    dropped_p = p
    if HAS_DROPOUT:
        stays = keep(keys, columns, threshold)
        dp = tl.where(stays, dp * keep_scale, 0.0)
        dropped_p = tl.where(stays, p, 0.0)
    return dropped_p, p * (dp - delta)


@triton.jit
def through_cap(ds, dots, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Multiply the gradient of capped scores by 1 - tanh(x)^2, where they were capped."""
    if HAS_SOFTCAP:
        tanh = scores(dots, scale, softcap, HAS_SOFTCAP) * (1.0 / (softcap * LOG2E))
        ds *= 1.0 - tanh * tanh
    return ds
