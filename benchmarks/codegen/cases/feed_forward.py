"""Every launch that changes the code of the feed-forward kernels: function, gate, dropout, dtype and tile."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

M, F = 4096, 2048
DROPOUT = 0.1
# Narrow: a width that is no multiple of the tile or of a vector.
CASES = [
    ("relu", torch.bfloat16, F, DROPOUT),
    ("gelu", torch.bfloat16, F, DROPOUT),
    ("gelu", torch.float16, F, 0.0),
    ("gelu", torch.float32, F, DROPOUT),
    ("gelu", torch.bfloat16, 100, DROPOUT),
    ("gelu_tanh", torch.bfloat16, F, DROPOUT),
    ("geglu", torch.bfloat16, F, DROPOUT),
    ("geglu", torch.float32, F, DROPOUT),
    ("swiglu", torch.bfloat16, F, 0.0),
    ("reglu", torch.bfloat16, F, DROPOUT),
]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _forward(activation: str, dtype: torch.dtype, width: int, dropout_p: float) -> Tensor:
    from fastformer_kernels.feed_forward import kernels as feed_forward

    wide = 2 * width if feed_forward.FORMS[activation][1] else width
    seed = _meta(1, dtype=torch.int64) if dropout_p else None
    return feed_forward.activate(_meta(M, wide, dtype=dtype), seed, activation, dropout_p)


def _backward(activation: str, dtype: torch.dtype, width: int, dropout_p: float) -> object:
    from fastformer_kernels.feed_forward import kernels as feed_forward

    wide = 2 * width if feed_forward.FORMS[activation][1] else width
    seed = _meta(1, dtype=torch.int64) if dropout_p else None
    da, h = _meta(M, width, dtype=dtype), _meta(M, wide, dtype=dtype)
    return feed_forward.activate_backward(da, h, seed, activation, dropout_p, True, True)


def _relu_backward(dtype: torch.dtype, width: int) -> object:
    from fastformer_kernels.feed_forward import kernels as feed_forward

    da = _meta(M, width, dtype=dtype)
    return feed_forward.relu_backward(da, da, DROPOUT, True)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a launch on meta tensors."""
    for activation, dtype, width, dropout_p in CASES:
        name = f"{activation} {str(dtype).removeprefix('torch.')} F {width}{' dropout' if dropout_p else ''}"
        yield f"{name} forward", partial(_forward, activation, dtype, width, dropout_p)
        yield f"{name} backward", partial(_backward, activation, dtype, width, dropout_p)
    for dtype, width in ((torch.bfloat16, F), (torch.float32, F), (torch.bfloat16, 100)):
        yield f"relu {str(dtype).removeprefix('torch.')} F {width} from a", partial(_relu_backward, dtype, width)
