"""Every launch that changes the code of the rotary kernel: pairs, sizes of heads, their number, dtypes."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

T, P = 4096, 2048
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
# dtypes of x and tables, heads of queries and keys, those of values behind them, K, R, interleaved
CASES = [
    (BF16, FP32, 16, 8, 64, 64, False),
    (BF16, FP32, 16, 8, 64, 64, True),
    (BF16, FP32, 40, 8, 128, 128, False),
    (BF16, FP32, 40, 8, 128, 128, True),
    (BF16, FP32, 32, 16, 80, 32, False),  # a part of each head, as in GPT-NeoX and Phi
    (BF16, FP32, 32, 16, 256, 64, True),  # as in GPT-J
    (BF16, FP32, 9, 3, 64, 64, False),  # no two heads a program
    (BF16, FP32, 16, 8, 40, 40, False),  # masked
    (BF16, FP64, 16, 8, 64, 64, False),
    (FP32, FP32, 16, 8, 64, 64, False),
    (FP32, FP32, 16, 8, 64, 64, True),
]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _turn(of: torch.dtype, tables: torch.dtype, H: int, others: int, K: int, R: int, interleaved: bool) -> object:
    from fastformer_kernels.rotary import kernels

    x = _meta(T, H + others, K, dtype=of)[:, :H]
    cos, sin = (_meta(P, R // 2, dtype=tables) for _ in range(2))
    return kernels.rotary(x, _meta(T, dtype=torch.int64), cos, sin, interleaved, 1.0)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for case in CASES:
        of, tables, H, _, K, R, interleaved = case
        name = f"{str(of).removeprefix('torch.')} H {H} K {K}{f' R {R}' if R < K else ''}"
        name += f"{' interleaved' if interleaved else ''}{' fp64 tables' if tables == FP64 else ''}"
        yield name, partial(_turn, *case)
