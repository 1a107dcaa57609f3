"""What the launchers of all attention kernels share: the arguments, as the kernels take them."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastformer_kernels.launch import as_bytes, device_of, inner_contiguous, power_of_two, precision
from fastformer_kernels.random import threshold_and_scale

# What kernels look up number by number, and may be a part of any tensor; not every kernel has all of them.
LOOKED_UP = ("bounds_ptr", "key_mask_ptr", "mask_ptr", "seed_ptr", "dweights_ptr")


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
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.expand(sizes).stride()
        if self.mask is not None and sizes[3] == 1:  # the last means nothing then, but kernels are compiled for it
            mask = (*mask[:3], 1)
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
            "HAS_SOFTCAP": 0 if self.softcap == 0.0 else 2 if q.dtype == torch.float32 else 1,
            "PRECISION": precision(q),
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


def score_tile(q: Tensor) -> dict[str, int]:
    """Choose the tile of a kernel that makes one tile of scores and no more: the largest square that spills nothing.

    Chosen from what the compiler reports (`python -m benchmarks.codegen`); not measured on a GPU.
    """
    if q.dtype == torch.float32:
        block = 32 if q.shape[-1] <= 128 else 16
    else:
        generation = device_of(q).capability // 10
        block = 64 if generation >= 9 else 32
        if q.shape[-1] > 128 and generation != 9:
            block = 16
    return {"BLOCK_T": block, "BLOCK_S": block, "num_warps": 8, "num_stages": 1}
