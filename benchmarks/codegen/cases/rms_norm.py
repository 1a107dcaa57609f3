"""Every launch that changes the code of the RMS norm kernels: tile, dtype, and which gradients are wanted."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

M = 65536
BF16, FP32 = torch.bfloat16, torch.float32
# The sizes are those of `layer_norm.py`, where they have their reasons.
CASES = [(N, BF16) for N in (64, 512, 768, 1000, 2048, 4096, 8192, 16384)]
CASES += [(N, FP32) for N in (512, 2048, 8192, 16384)]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(N: int, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype) -> object:
    from fastformer_kernels.norms import rms_norm

    return rms_norm.forward(_meta(M, N, dtype=x), None if weight is None else _meta(N, dtype=weight), 1e-5, y)


def _backward(N: int, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype, wants_x: bool = True) -> object:
    from fastformer_kernels.norms import rms_norm

    row = None if weight is None else _meta(N, dtype=weight)
    dy, x_, rstd = _meta(M, N, dtype=y), _meta(M, N, dtype=x), _meta(M, dtype=FP32)
    return rms_norm.backward(dy, x_, row, rstd, x if wants_x else None, weight)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for N, dtype in CASES:
        name = f"N {N} {str(dtype).removeprefix('torch.')}"
        yield f"{name} forward", partial(_forward, N, dtype, dtype, dtype)
        yield f"{name} backward", partial(_backward, N, dtype, dtype, dtype)
    yield "N 512 autocast forward", partial(_forward, 512, BF16, FP32, FP32)
    yield "N 512 autocast backward", partial(_backward, 512, BF16, FP32, FP32)
    yield "N 1024 no weight forward", partial(_forward, 1024, BF16, None, BF16)
    yield "N 1024 no weight backward", partial(_backward, 1024, BF16, None, BF16)
    yield "N 1024 dw only", partial(_backward, 1024, BF16, BF16, BF16, False)
