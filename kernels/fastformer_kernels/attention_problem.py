"""What the launchers of all attention kernels share: the arguments, as the kernels take them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer_kernels.launch import as_bytes, device_of, inner_contiguous, kernel, power_of_two, precision
from fastformer_kernels.random import threshold_and_scale

# What a kernel of heads is compiled for: rows of masks, of their gradient and of that of weights are `lined_up`. Not
# every kernel has them all.
attends = kernel(
    *("stride_mb", "stride_mh", "stride_mt", "stride_ms", "stride_wb", "stride_wh", "stride_wt"),
    *("stride_db", "stride_dh", "stride_dt"),
    anywhere=["bounds_ptr", "key_mask_ptr", "seed_ptr"],
)
_LINE = 16  # elements


class View(NamedTuple):
    """A tensor of heads as the kernels see it: dense `[B, H, T, K]` or packed `[T, H, K]`, and its strides."""

    data: Tensor
    strides: tuple[int, int, int]  # of batch (0 where packed), head and row, in units of the alignment


def views(*tensors: Tensor) -> tuple[int, list[View]]:
    """Describe tensors of heads, copied if their last dimension is not contiguous.

    Returns:
        The alignment, and the views. Every stride is a multiple of the alignment, 16 bytes where it can be: multiplied
        in the kernel, it tells the compiler that rows can be loaded in whole vectors, where a head size such as 40 or
        72 hides that. Compiled for head size 72 without it: 16-bit loads, and a third more registers.
    """
    found, bits = [], 0
    for x in tensors:
        x = inner_contiguous(x)
        strides = x.stride()
        batch, head, row = strides[:3] if len(strides) == 4 else (0, strides[1], strides[0])
        bits |= batch | head | row
        found.append(View(x, (batch, head, row)))
    align = 16 // tensors[0].element_size()
    if bits % align:
        return 1, found
    return align, [View(x, (s[0] // align, s[1] // align, s[2] // align)) for x, s in found]


def lined_up(x: Tensor) -> Tensor:
    """Return x `[..., S]`, copied if its rows do not begin at multiples of 16 elements, so that kernels may rely on it.

    They load a tile of it in whole vectors then. Compiled for odd S they took 40 to 90 registers more, and spilled.
    """
    rows = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(stride % _LINE for stride in rows):
        return x
    copy = x.new_empty((*x.shape[:-1], whole_lines(x.shape[-1])))[..., : x.shape[-1]]
    return copy.copy_(x)


def whole_lines(columns: int) -> int:
    """Return how long a row is that ends at a multiple of 16 elements."""
    return -(-columns // _LINE) * _LINE


def row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of batch (0 where packed) and head of `[H, T]`, `[B, H, T]` or `[2, B, H, T]`."""
    return (0, x.stride(0)) if x.dim() == 2 else (x.stride(-3), x.stride(-2))


class Problem(NamedTuple):
    """What all attention kernels take besides the tensors of heads."""

    bounds: Tensor | None  # int32 [B, 8] of `attention_bounds`
    key_mask: Tensor | None  # bool [B, S]; needed where the bounds say that there are gaps
    mask: Tensor | None  # bool or additive, broadcastable to [B, H, T, S]
    seed: Tensor | None  # int64 [1]; dropout if given
    queries: int  # T; of the longest sequence where packed
    keys: int  # S; likewise
    shift: int  # of the diagonal, where there are no bounds
    left: int  # of the window, -1 = unlimited
    right: int  # likewise; 0 = causal
    scale: float
    softcap: float  # 0 = none
    dropout_p: float

    @classmethod
    def of(cls, *settings: Any) -> "Problem":
        """Return the problem of a kernel that reads the mask."""
        problem = cls(*settings)
        return problem if problem.mask is None else problem._replace(mask=lined_up(problem.mask))

    def sizes(self, q: Tensor) -> tuple[int, int, int, int]:
        """Return (B, H, T, S)."""
        if q.dim() == 3:
            assert self.bounds is not None
            return self.bounds.shape[0], q.shape[1], self.queries, self.keys
        return q.shape[0], q.shape[1], self.queries, self.keys

    def rows(self, q: Tensor) -> tuple[int, ...]:
        """Return the shape of the log-sum-exp: `[B, H, T]`, packed `[H, T]`, and in two parts with an additive mask.

        A mask of the lowest number, as some libraries add, leaves no bits for the logarithm of the sum beside the
        maximum; backward must have both.
        """
        B, H, T, _ = self.sizes(q)
        if q.dim() == 3:
            return H, q.shape[0]
        return (2, B, H, T) if self.additive else (B, H, T)

    @property
    def additive(self) -> bool:
        """Whether there is a mask to add."""
        return self.mask is not None and self.mask.dtype != torch.bool

    def pointers(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return bounds, key mask, mask and seed; q stands for what is not given, and is never read there."""
        return (
            q if self.bounds is None else self.bounds,
            q if self.key_mask is None else as_bytes(self.key_mask.contiguous()),
            q if self.mask is None else as_bytes(self.mask) if self.mask.dtype == torch.bool else self.mask,
            q if self.seed is None else self.seed,
        )

    def mask_strides(self, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Return the stride of the key mask's rows, and the mask's of B, H, T and S, 0 where it is broadcast."""
        mask = [0, 0, 0, 0]
        if self.mask is not None:
            given = [
                0 if size == 1 else stride for size, stride in zip(self.mask.shape, self.mask.stride(), strict=True)
            ]
            mask[4 - len(given) :] = given
            mask[3] = (
                1 if sizes[3] == 1 else mask[3]
            )  # of one key it means nothing, but the kernels are compiled for it
        return (0 if self.key_mask is None else self.key_mask.shape[1], *mask)

    def scalars(self) -> tuple[int | float, ...]:
        """Return shift, left, right, scale, softcap, dropout threshold and scale of what is kept."""
        threshold, keep_scale = threshold_and_scale(0.0 if self.seed is None else self.dropout_p)
        return self.shift, self.left, self.right, self.scale, self.softcap, threshold, keep_scale

    def head_switches(self, q: Tensor) -> dict[str, int | bool]:
        """Return the compile-time choices of a kernel that reads heads and bounds."""
        K = q.shape[-1]
        return {"H": q.shape[1], "K": K, "BLOCK_K": power_of_two(K, 16), "HAS_BOUNDS": self.bounds is not None}

    def score_switches(self, q: Tensor) -> dict[str, int | bool | str]:
        """Return those of a kernel that computes scores, of which each query sees keys by position and key mask."""
        return {
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "HAS_KEY_MASK": self.key_mask is not None,
            "HAS_SOFTCAP": 0 if self.softcap == 0.0 else 2 if is_exact(q) else 1,
            "PRECISION": "ieee" if is_exact(q) else precision(q),
        }

    def switches(self, q: Tensor, k: Tensor) -> dict[str, int | bool | str]:
        """Return those of a kernel that takes the whole problem."""
        return {
            **self.head_switches(q),
            **self.score_switches(q),
            "GROUP": q.shape[1] // k.shape[1],
            "PACKED": q.dim() == 3,
            "MASK": 0 if self.mask is None else 2 if self.additive else 1,
            "HAS_DROPOUT": self.seed is not None,
        }


def is_exact(q: Tensor) -> bool:
    """Return whether products are those of fp32, which plain cores multiply: matrix units take 16 bits and tf32.

    torch's setting allows tf32 and does not ask for it. Beyond a head size of 128 it is not used: mask gradient and
    backward spill 40 to 2,016 bytes in every tile that was compiled, of 16 rows and more.
    """
    return q.dtype == torch.float32 and (precision(q) == "ieee" or q.shape[-1] > 128)


def head_width(q: Tensor) -> int:
    """Return the head size that tiles depend on, as a power of two: in tf32, that of as many bytes in 16 bits.

    A row of tf32 takes twice the shared memory, and twice the registers where it is an operand.
    """
    K = power_of_two(q.shape[-1], 16)
    return 2 * K if q.dtype == torch.float32 and not is_exact(q) else K


def score_tile(q: Tensor) -> dict[str, int]:
    """Choose the tile of a kernel that makes one tile of scores and no more: the largest square that spills nothing.

    Chosen from what the compiler reports (`python -m benchmarks.codegen`); not measured on a GPU.
    """
    width, generation = head_width(q), device_of(q).capability // 10
    if is_exact(q):
        block = 32 if width <= 128 else 16
    else:
        block = 64 if generation >= 9 else 32
        if width > 128 and generation != 9:
            block = 16
    return {"BLOCK_T": block, "BLOCK_S": block, "num_warps": 8, "num_stages": 1}
