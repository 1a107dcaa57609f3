"""Host code of all attention launchers: the arguments in the form that kernels take, and the bounds of sequences.

Lengths, a bool key mask or the offsets of packed sequences become one int32 tensor `[B, 8]`, the bounds, which every
attention kernel reads; `scores` names its columns. Of a key mask they hold the first and the last real key, so that
tiles of padding on either side are skipped, and a flag for padding in between. The bounds are computed on the device,
so the host does not wait.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastformer_kernels.attention import tiles
from fastformer_kernels.attention.arguments import Arguments
from fastformer_kernels.host.architecture import EXACT_ON_TENSOR_CORES
from fastformer_kernels.host.launch import (
    as_bytes,
    device_of,
    guard,
    inner_contiguous,
    kernel,
    launch,
    power_of_two,
    precision,
    recorded,
    threshold_and_scale,
)

# The decorator of attention kernels. They are specialised for those of these strides that they have: rows of masks, of
# the mask's gradient and of the weights' gradient are aligned (`with_aligned_rows`).
attention_kernel = kernel(
    *("stride_mask_b", "stride_mask_h", "stride_mask_t", "stride_mask_s"),
    *("stride_dmask_b", "stride_dmask_h", "stride_dmask_t"),
    *("stride_dweights_b", "stride_dweights_h", "stride_dweights_t"),
    anywhere=["bounds_ptr", "lengths_ptr", "key_mask_ptr", "bias_ptr", "seed_ptr", "sinks_ptr"],
)
_ROW_ALIGNMENT = 16  # elements
# Softcaps above it need fp32's accuracy in 16 bits and tf32, too: without it scores have an error of 1.2e-7 of the cap.
_LARGE_SOFTCAP = 1000.0
_BLOCK = tl.constexpr(1024)  # keys that the kernel of the bounds reads at a time


class View(NamedTuple):
    """A tensor of heads as the kernels see it: dense `[B, H, T, K]` or packed `[T, H, K]`, and its strides."""

    data: Tensor
    strides: tuple[int, int, int]  # of batch (0 where packed), head and row, in units of the alignment


def views(*tensors: Tensor) -> tuple[int, list[View]]:
    """Describe tensors of heads, copied if their last dimension is not contiguous.

    Returns:
        The alignment ALIGN in elements, and the views. ALIGN is 16 bytes if all strides and head sizes are multiples of
        that, else one element. Kernels multiply strides by it, so the compiler knows that rows can be loaded in whole
        vectors, also for head sizes such as 40 and 72. Compiled for head size 72 without it: 16-bit loads, a third more
        registers. With an ALIGN of 16 bytes, tensors whose address is no multiple of 16 are copied: if only the keys
        had such an address, Triton 3.7 omitted the fence before the wgmma of the values (docs/kernels/shared.md).
    """
    in_elements, bits = [], 0
    for x in tensors:
        x = inner_contiguous(x)
        strides = x.stride()
        batch, head, row = strides[:3] if len(strides) == 4 else (0, strides[1], strides[0])
        bits |= batch | head | row | x.shape[-1]
        in_elements.append(View(x, (batch, head, row)))
    align = 16 // tensors[0].element_size()
    if bits % align:
        return 1, in_elements
    if any(x.data_ptr() % 16 for x, _ in in_elements):
        return views(*[x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x for x in tensors])
    return align, [View(x, (s[0] // align, s[1] // align, s[2] // align)) for x, s in in_elements]


def with_aligned_rows(x: Tensor) -> Tensor:
    """Return x `[..., S]`, copied unless its rows begin at multiples of 16 elements, which kernels rely on.

    Kernels then load tiles in whole vectors. Compiled for odd S they took 40 to 90 registers more, and spilled. Where x
    is expanded, so is the copy: of a mask `[1, 1, T, S]` for B * H heads it takes T * S elements.
    """
    rows = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(stride % _ROW_ALIGNMENT for stride in rows):
        return x
    repeated = [stride == 0 for stride in x.stride()[:-1]]  # as of a mask that was expanded over heads
    once = x[tuple([slice(0, 1) if again else slice(None) for again in repeated])]
    copy = x.new_empty((*once.shape[:-1], aligned_length(x.shape[-1])))[..., : x.shape[-1]]
    return copy.copy_(once).expand(x.shape)


def aligned_length(columns: int) -> int:
    """Return the length of a row rounded up to a multiple of 16 elements."""
    return -(-columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def row_strides(x: Tensor, q: Tensor) -> tuple[int, int]:
    """Return the strides of batch (0 if q is packed) and head of x, `[B, H, T]`, packed `[H, T]`, or `[2, ...]`."""
    return (0 if q.dim() == 3 else x.stride(-3), x.stride(-2))


def rows_of(q: Tensor) -> tuple[int, ...]:
    """Return the shape of one number per query and head: `[B, H, T]`, packed `[H, T]`."""
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else tuple(q.shape[:3])


class Problem(Arguments):
    """The arguments of a call, as launchers read them."""

    @classmethod
    def of(cls, *arguments: Any) -> "Problem":
        """Return the problem with a mask, bias and sinks whose strides the kernels can use."""
        problem = cls(*arguments)
        mask, bias, sinks = problem.mask, problem.distance_bias, problem.sinks
        if mask is not None:
            problem = problem._replace(mask=with_aligned_rows(mask))
        if bias is not None or sinks is not None:
            bias, sinks = (None if x is None else x.contiguous() for x in (bias, sinks))
            problem = problem._replace(distance_bias=bias, sinks=sinks)
        return problem

    def sizes(self, q: Tensor) -> tuple[int, int, int, int]:
        """Return (B, H, T, S)."""
        if q.dim() == 3:
            assert self.bounds is not None
            return self.bounds.shape[0], q.shape[1], self.queries, self.keys
        return q.shape[0], q.shape[1], self.queries, self.keys

    def rows(self, q: Tensor) -> tuple[int, ...]:
        """Return the shape of the log-sum-exp: `[B, H, T]`, packed `[H, T]`; `[2, ...]` with an additive mask or bias.

        Then maximum and logarithm of the sum are stored apart: beside the lowest number of a dtype, which some
        libraries add as a mask, their sum would have no bits for the logarithm.
        """
        return (2, *rows_of(q)) if self.added else rows_of(q)

    @property
    def added(self) -> bool:
        """Whether an additive mask or a bias is added to scores."""
        return self.distance_bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)

    def pointers(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return bounds, key mask, mask, bias and seed; q replaces absent ones, and kernels do not read it there."""
        return (
            q if self.bounds is None else self.bounds,
            q if self.key_mask is None else as_bytes(self.key_mask.contiguous()),
            q if self.mask is None else as_bytes(self.mask) if self.mask.dtype == torch.bool else self.mask,
            q if self.distance_bias is None else self.distance_bias,
            q if self.seed is None else self.seed,
        )

    def mask_strides(self, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Return the strides of the key mask's rows, the mask's B, H, T, S (0 where broadcast), and the bias' H."""
        mask = [0, 0, 0, 0]
        if self.mask is not None:
            strides = [
                0 if size == 1 else stride for size, stride in zip(self.mask.shape, self.mask.stride(), strict=True)
            ]
            mask[4 - len(strides) :] = strides
            if sizes[3] == 1:
                mask[3] = 1  # the stride of a single key is arbitrary, but kernels are compiled for it
        key_mask = 0 if self.key_mask is None else self.key_mask.shape[1]
        return (key_mask, *mask, 0 if self.distance_bias is None else self.distance_bias.shape[1])

    def scalars(self) -> tuple[int | float, ...]:
        """Return shift, left, right, scale, softcap, dropout threshold and dropout scale."""
        threshold, keep_scale = threshold_and_scale(0.0 if self.seed is None else self.dropout_p)
        return self.shift, self.left, self.right, self.scale, self.softcap, threshold, keep_scale

    def head_switches(self, q: Tensor) -> dict[str, int | bool]:
        """Return the compile-time choices of a kernel that reads heads and bounds."""
        return {"H": q.shape[1], "HAS_BOUNDS": self.bounds is not None}

    def score_switches(self, wide: Tensor) -> dict[str, int | bool | str]:
        """Return the compile-time choices of a kernel that computes scores, limited by positions and key mask."""
        return {
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "HAS_KEY_MASK": self.key_mask is not None,
            "HAS_SOFTCAP": 0 if self.softcap == 0.0 else 2 if is_exact(wide) or self.softcap > _LARGE_SOFTCAP else 1,
            "PRECISION": "ieee" if is_exact(wide) else precision(wide),
        }

    @property
    def mask_kind(self) -> int:
        """The constant MASK of kernels (`scores.hide`)."""
        kind = 0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2
        return kind if self.distance_bias is None else 3 + kind

    def switches(self, q: Tensor, k: Tensor, v: Tensor | None) -> dict[str, int | bool | str]:
        """Return the compile-time choices of a kernel that takes the whole problem; v is None if it reads no values."""
        wide = q if v is None else wider(q, v)
        return {
            **self.head_switches(q),
            **head_size("K", q, wide),
            **({} if v is None else head_size("V", v, v)),
            **self.score_switches(wide),
            "GROUP": q.shape[1] // k.shape[1],
            "PACKED": q.dim() == 3,
            "MASK": self.mask_kind,
            "HAS_DROPOUT": self.seed is not None,
        }

    def tile(self, family: str, wide: Tensor, *features: str) -> dict[str, int]:
        """Return the tile sizes of a kernel, by the names of its parameters.

        Args:
            family: a table of `tiles`.
            wide: as `wider` returns it.
            features: of the call, besides those that its arguments state.
        """
        masked = self.mask is not None or self.softcap > 0.0
        present_by_feature = {
            "heavy": masked or self.distance_bias is not None,
            "masked": masked,
            "bias": self.distance_bias is not None,
            "key mask": self.key_mask is not None,
            "dropout": self.seed is not None,
        }
        products = "16" if wide.element_size() == 2 else "fp32" if is_exact(wide) else "tf32"
        call = tiles.Call(
            *(family, device_of(wide).architecture, products, head_width(wide), self.queries),
            frozenset(features).union(name for name, present in present_by_feature.items() if present),
        )
        return tiles.choose(call)


def wider(q: Tensor, v: Tensor) -> Tensor:
    """Return q or v, whichever has the larger head size, which decides tiles and precision."""
    return q if q.shape[-1] >= v.shape[-1] else v


def head_size(letter: str, x: Tensor, wide: Tensor) -> dict[str, int]:
    """Return the compile-time head size of x, and the width of its tiles, which is that of `wide`.

    If values are wider, so are the tiles of queries and keys. With narrower ones Triton arranged warps differently, and
    forward and dK/dV spilled 16 to 4,176 bytes (head sizes 64 and 128, sm_80).
    """
    return {letter: x.shape[-1], f"BLOCK_{letter}": power_of_two(wide.shape[-1], 16)}


def is_exact(wide: Tensor) -> bool:
    """Return whether products have the accuracy of fp32: on plain cores, or as three of tf32 (`exact_precision`).

    They have it for head sizes above 128 even if torch's setting allows tf32: with tf32, backward and the gradient of a
    mask spill 40 to 2,016 bytes in every tile that was compiled, of 16 rows and more.
    """
    return wide.dtype == torch.float32 and (precision(wide) == "ieee" or wide.shape[-1] > 128)


def exact_precision(wide: Tensor) -> str:
    """Return how exact fp32 is multiplied: "tf32x3" up to the head size that registers allow, else "ieee".

    Three products of tf32 on tensor cores have the error of one on plain cores, 4e-7 to 9e-7 of the norm, and take a
    half to a sixth of its time (H200, head sizes 64 and 128).
    """
    return "tf32x3" if wide.shape[-1] <= EXACT_ON_TENSOR_CORES.get(device_of(wide).architecture, 0) else "ieee"


def head_width(wide: Tensor) -> int:
    """Return the head size that tiles depend on, as a power of two; twice the head size in tf32.

    A row of tf32 takes twice the shared memory, and twice the registers where it is an operand.
    """
    width = power_of_two(wide.shape[-1], 16)
    return 2 * width if wide.dtype == torch.float32 and not is_exact(wide) else width


def side_by_side(q: Tensor, problem: Problem, heads: int, head_bytes: int) -> int:
    """Return how many heads' tiles alternate (`scores.place`): as many as half of the L2 holds, in equal groups.

    With causality the last tiles of queries, and the first of keys, take longest, and should start first, of all heads
    and not of each. Then the tiles of many heads read keys and values at the same time, which must stay in the L2: half
    of it, because each half of an A100's or H100's L2 serves its own multiprocessors. Simulated, bf16, head size
    64, tiles 128 x 64, one on each of 132 multiprocessors, time over that of work spread evenly:

    | B, H, tokens | head by head | this order |
    |---|---|---|
    | 4, 12, 1024 | 1.38 | 1.07, and no order is better |
    | 4, 12, 2048 | 1.19 | 1.01 |
    | 4, 8, 1024 | 1.60 | 1.03 |
    | 8, 16, 1024 | 1.15 | 1.03 |
    | 8, 16, 8192 | 1.01 | 1.00 |

    Not measured on a GPU. Without causality all tiles take equally long, and heads follow one another.

    Args:
        heads: of the grid, B * H.
        head_bytes: bytes that all tiles of one head read.
    """
    if problem.right < 0:
        return 1
    most = max(1, device_of(q).cache // 2 // max(head_bytes, 1))
    groups = -(-heads // most)
    return -(-heads // groups)


@kernel(anywhere=["query_lengths_ptr", "key_lengths_ptr", "key_mask_ptr"])
def _attention_bounds(
    bounds_ptr, query_lengths_ptr, key_lengths_ptr, key_mask_ptr, T, S,
    PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_QUERY_LENGTHS: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
):  # fmt: skip
    """Fill the row of one sequence; if packed, the pointers of the lengths are those of the offsets."""
    b = tl.program_id(0)
    q_base, k_base, queries, keys = b * 0, b * 0, b * 0 + T, b * 0 + S
    if PACKED:
        q_base = tl.load(query_lengths_ptr + b).to(tl.int32)
        k_base = tl.load(key_lengths_ptr + b).to(tl.int32)
        queries = tl.load(query_lengths_ptr + b + 1).to(tl.int32) - q_base
        keys = tl.load(key_lengths_ptr + b + 1).to(tl.int32) - k_base
    else:
        # Lengths on a GPU are not checked, because the host would wait for them. Clamped, no kernel leaves its tensors.
        if HAS_QUERY_LENGTHS:
            queries = tl.minimum(tl.maximum(tl.load(query_lengths_ptr + b).to(tl.int32), 0), T)
        if HAS_KEY_LENGTHS:
            keys = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + b).to(tl.int32), 0), S)
    first, last, gaps = b * 0, keys, b * 0
    if HAS_KEY_MASK:
        row = key_mask_ptr + b.to(tl.int64) * S
        low = tl.full((_BLOCK,), 2147483647, tl.int32)
        high = tl.zeros((_BLOCK,), tl.int32)
        seen = tl.zeros((_BLOCK,), tl.int32)
        for start in tl.range(0, S, _BLOCK):
            at = start + tl.arange(0, _BLOCK)
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
        bottom_right: whether the diagonal ends at the last query and the last key of a sequence.
        like: any tensor on the device.
    """
    result = recorded(like.new_empty((batch, 8), dtype=torch.int32))
    if batch == 0:
        return result
    lengths = [like if x is None else x.contiguous() for x in (query_lengths, key_lengths)]
    mask = like if key_mask is None else as_bytes(key_mask.contiguous())
    constants = (packed, bottom_right, query_lengths is not None, key_lengths is not None, key_mask is not None)
    with guard(like):
        launch(_attention_bounds, (batch,), result, *lengths, mask, queries, keys, *constants, num_warps=4)
    return result
