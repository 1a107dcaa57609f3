"""Every launch that changes the code of the layer norm kernels: tile, dtype, and which gradients are wanted."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

M = 65536
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# 64 to 1024: several rows a tile. 768: columns that need a mask. 8200, 16384: two passes. 1000, 8200: rows that are not
# aligned.
CASES = [(N, BF16) for N in (64, 512, 768, 1024, 1000, 2048, 4096, 8192, 8200, 16384)]
CASES += [(N, FP32) for N in (512, 768, 1000, 2048, 8192, 16384)]
CASES += [(1024, FP16)]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(N: int, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype) -> object:
    from fastformer_kernels.norms import layer_norm

    row = None if weight is None else _meta(N, dtype=weight)
    return layer_norm.forward(_meta(M, N, dtype=x), row, row, 1e-5, y)


def _backward(
    N: int, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype, wants_x: bool = True, wants_weight: bool = True
) -> object:
    from fastformer_kernels.norms import layer_norm

    row, statistic = None if weight is None else _meta(N, dtype=weight), _meta(M, dtype=FP32)
    wanted = weight if wants_weight else None
    dy, x_ = _meta(M, N, dtype=y), _meta(M, N, dtype=x)
    return layer_norm.backward(dy, x_, row, statistic, statistic, x if wants_x else None, wanted, wanted)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for N, dtype in CASES:
        name = f"N {N} {str(dtype).removeprefix('torch.')}"
        yield f"{name} forward", partial(_forward, N, dtype, dtype, dtype)
        yield f"{name} backward", partial(_backward, N, dtype, dtype, dtype)
    for N in (512, 8192):
        yield f"N {N} autocast forward", partial(_forward, N, BF16, FP32, FP32)
        yield f"N {N} autocast backward", partial(_backward, N, BF16, FP32, FP32)
    yield "N 1024 no parameters forward", partial(_forward, 1024, BF16, None, BF16)
    yield "N 1024 no parameters backward", partial(_backward, 1024, BF16, None, BF16)
    yield "N 1024 dx only", partial(_backward, 1024, BF16, BF16, BF16, True, False)
    yield "N 1024 dw and db only", partial(_backward, 1024, BF16, BF16, BF16, False, True)
