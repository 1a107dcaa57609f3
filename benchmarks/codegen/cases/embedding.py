"""Every launch that changes the code of the embedding kernels: positions, dropout, dtype and width of the tile."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

M, V, P = 4096, 16000, 512
CASES = [
    (torch.bfloat16, 512, True, 0.1),
    (torch.bfloat16, 512, False, 0.0),
    (torch.float32, 512, True, 0.1),
    (torch.bfloat16, 4096, True, 0.1),
    (torch.bfloat16, 100, True, 0.1),
]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(dtype: torch.dtype, width: int, has_positions: bool, dropout_p: float) -> object:
    from fastformer_kernels.embedding import kernels as embedding

    ids = _meta(M, dtype=torch.int64)
    table = _meta(P, width, dtype=dtype) if has_positions else None
    seed = _meta(1, dtype=torch.int64) if dropout_p else None
    weight = _meta(V, width, dtype=dtype)
    return embedding.embedding(ids, weight, ids if has_positions else None, table, seed, 22.6, dropout_p)


def _backward(dtype: torch.dtype, width: int, dropout_p: float) -> object:
    from fastformer_kernels.embedding import kernels as embedding

    seed = _meta(1, dtype=torch.int64) if dropout_p else None
    return embedding.scaled_gradient(_meta(M, width, dtype=dtype), seed, 22.6, dropout_p)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for dtype, width, has_positions, dropout_p in CASES:
        name = f"{str(dtype).removeprefix('torch.')} D {width}{' dropout' if dropout_p else ''}"
        yield (
            f"{name}{' positions' if has_positions else ''} forward",
            partial(_forward, dtype, width, has_positions, dropout_p),
        )
        yield f"{name} backward", partial(_backward, dtype, width, dropout_p)
