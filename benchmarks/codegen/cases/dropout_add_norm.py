"""Every launch that changes the code of dropout, sum and norm: the norm, tile, dtype, dropout, which gradients come."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

M = 65536
BF16, FP32 = torch.bfloat16, torch.float32
# The sizes are those of `layer_norm.py`, where they have their reasons.
CASES = [(N, BF16) for N in (64, 512, 768, 1024, 1000, 2048, 4096, 8192, 16384)]
CASES += [(N, FP32) for N in (512, 1000, 2048, 8192, 16384)]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _seed(dropout_p: float) -> Tensor | None:
    return _meta(1, dtype=torch.int64) if dropout_p > 0.0 else None


def _forward(centred: bool, N: int, x: torch.dtype, residual: torch.dtype, dropout_p: float) -> object:
    from fastformer_kernels.norms import dropout_add_norm

    row = _meta(N, dtype=residual)
    both = (_meta(M, N, dtype=x), _meta(M, N, dtype=residual))
    norm = (row, row if centred else None)
    return dropout_add_norm.forward(*both, *norm, _seed(dropout_p), 1e-5, dropout_p, centred, residual)


def _backward(
    centred: bool,
    N: int,
    x: torch.dtype,
    residual: torch.dtype,
    dropout_p: float,
    has_dy: bool = True,
    has_ds: bool = True,
) -> object:
    from fastformer_kernels.norms import dropout_add_norm

    s, row, statistic = _meta(M, N, dtype=residual), _meta(N, dtype=residual), _meta(M, dtype=FP32)
    dw = residual if has_dy else None
    wanted = (residual, x if dropout_p > 0.0 or x != residual else None, dw, dw if centred else None)
    grads = (s if has_dy else None, s if has_ds else None)
    statistics = (statistic if centred else None, statistic)
    return dropout_add_norm.backward(*grads, s, row, *statistics, _seed(dropout_p), dropout_p, *wanted)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for centred in (True, False):
        for name, launch in _cases(centred):
            yield (name if centred else f"RMS norm, {name}"), launch


def _cases(centred: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    forward, backward = partial(_forward, centred), partial(_backward, centred)
    for N, dtype in CASES:
        name = f"N {N} {str(dtype).removeprefix('torch.')}"
        yield f"{name} forward", partial(forward, N, dtype, dtype, 0.1)
        yield f"{name} backward pre-norm", partial(backward, N, dtype, dtype, 0.1)
        if N in (512, 2048):
            yield f"{name} backward post-norm", partial(backward, N, dtype, dtype, 0.1, True, False)
            yield f"{name} forward no dropout", partial(forward, N, dtype, dtype, 0.0)
            yield f"{name} backward no dropout", partial(backward, N, dtype, dtype, 0.0)
    yield "N 512 bfloat16 backward sum only", partial(backward, 512, BF16, BF16, 0.1, False, True)
    for N in (512, 8192):
        yield f"N {N} autocast forward", partial(forward, N, BF16, FP32, 0.1)
        yield f"N {N} autocast backward", partial(backward, N, BF16, FP32, 0.1)
