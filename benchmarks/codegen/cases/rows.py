"""Launches of the kernels that work row by row: norms, feed-forward, embedding, rotary and the output loss.

Every launch that changes their code: tile, dtype, options, and the gradients that are computed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.codegen.cases import meta
from fastformer_kernels.embedding import kernels as embedding
from fastformer_kernels.feed_forward import kernels as feed_forward
from fastformer_kernels.linear_cross_entropy import kernels as linear_cross_entropy
from fastformer_kernels.norms import norm
from fastformer_kernels.rotary import kernels as rotary

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROWS = 65536  # of the norms
DROPOUT = 0.1

Cases = Iterator[tuple[str, Callable[[], object]]]


def _seed(dropout_p: float) -> Tensor | None:
    return meta(1, dtype=torch.int64) if dropout_p > 0.0 else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Norms. 64 to 1024: several rows a tile. 768: columns that need a mask. 8200, 16384: two passes. 1000, 8200: rows that
# are not aligned.


def _norm(
    rms: bool, gradients: str | None, N: int, x: torch.dtype, weight: torch.dtype | None, y: torch.dtype
) -> object:
    """Launch forward, or backward with the gradients "x", "weight" or "both"."""
    row, statistic = None if weight is None else meta(N, dtype=weight), meta(ROWS)
    inputs = meta(ROWS, N, dtype=x), row
    if gradients is None:
        return norm.rms_norm(*inputs, 1e-5, y) if rms else norm.layer_norm(*inputs, row, 1e-5, y)
    dy, dx, dw = meta(ROWS, N, dtype=y), x if gradients != "weight" else None, weight if gradients != "x" else None
    mean, db = (None, None) if rms else (statistic, dw)
    return norm.norm_backward(dy, *inputs, mean, statistic, dx, dw, db)


def _norm_launches(rms: bool, sizes: list[tuple[int, torch.dtype]], autocast: tuple[int, ...]) -> Cases:
    cases: list[tuple[str, Any]] = [(f"N {N} {_name(dtype)}", (N, dtype, dtype, dtype)) for N, dtype in sizes]
    cases += [(f"N {N} autocast", (N, BF16, FP32, FP32)) for N in autocast]
    cases += [(f"N 1024 no {'weight' if rms else 'parameters'}", (1024, BF16, None, BF16))]
    for name, arguments in cases:
        yield f"{name} forward", partial(_norm, rms, None, *arguments)
        yield f"{name} backward", partial(_norm, rms, "both", *arguments)
    if not rms:
        yield "N 1024 dx only", partial(_norm, rms, "x", 1024, BF16, BF16, BF16)
    yield f"N 1024 {'dw' if rms else 'dw and db'} only", partial(_norm, rms, "weight", 1024, BF16, BF16, BF16)


def layer_norm_cases() -> Cases:
    sizes = [(N, BF16) for N in (64, 512, 768, 1024, 1000, 2048, 4096, 8192, 8200, 16384)]
    sizes += [(N, FP32) for N in (512, 768, 1000, 2048, 8192, 16384)] + [(1024, FP16)]
    return _norm_launches(False, sizes, (512, 8192))


def rms_norm_cases() -> Cases:
    sizes = [(N, BF16) for N in (64, 512, 768, 1000, 2048, 4096, 8192, 16384)]
    sizes += [(N, FP32) for N in (512, 2048, 8192, 16384)]
    return _norm_launches(True, sizes, (512,))


def _add_norm(centred: bool, N: int, x: torch.dtype, residual: torch.dtype, dropout_p: float) -> object:
    row = meta(N, dtype=residual)
    both = (meta(ROWS, N, dtype=x), meta(ROWS, N, dtype=residual))
    parameters = (row, row if centred else None)
    return norm.dropout_add_norm(*both, *parameters, _seed(dropout_p), 1e-5, dropout_p, centred, residual)


def _add_norm_backward(
    centred: bool, N: int, x: torch.dtype, residual: torch.dtype, dropout_p: float, grads: str = "dy ds"
) -> object:
    s, row, statistic = meta(ROWS, N, dtype=residual), meta(N, dtype=residual), meta(ROWS)
    dw = residual if "dy" in grads else None
    dtypes = (residual, x if dropout_p > 0.0 or x != residual else None, dw, dw if centred else None)
    dy, ds = (s if each in grads else None for each in ("dy", "ds"))
    statistics = (statistic if centred else None, statistic)
    return norm.dropout_add_norm_backward(dy, ds, s, row, *statistics, _seed(dropout_p), dropout_p, *dtypes)


def dropout_add_norm_cases() -> Cases:
    """Yield a name and a launch on meta tensors, with layer norm and with RMS norm."""
    sizes = [(N, BF16) for N in (64, 512, 768, 1024, 1000, 2048, 4096, 8192, 16384)]
    sizes += [(N, FP32) for N in (512, 1000, 2048, 8192, 16384)]
    for centred in (True, False):
        forward, backward = partial(_add_norm, centred), partial(_add_norm_backward, centred)
        kind = "" if centred else "RMS norm, "
        for N, dtype in sizes:
            name = f"{kind}N {N} {_name(dtype)}"
            yield f"{name} forward", partial(forward, N, dtype, dtype, DROPOUT)
            yield f"{name} backward pre-norm", partial(backward, N, dtype, dtype, DROPOUT)
            if N in (512, 2048):
                yield f"{name} backward post-norm", partial(backward, N, dtype, dtype, DROPOUT, "dy")
                yield f"{name} forward no dropout", partial(forward, N, dtype, dtype, 0.0)
                yield f"{name} backward no dropout", partial(backward, N, dtype, dtype, 0.0)
        yield f"{kind}N 512 bfloat16 backward sum only", partial(backward, 512, BF16, BF16, DROPOUT, "ds")
        for N in (512, 8192):
            yield f"{kind}N {N} autocast forward", partial(forward, N, BF16, FP32, DROPOUT)
            yield f"{kind}N {N} autocast backward", partial(backward, N, BF16, FP32, DROPOUT)


def feed_forward_cases() -> Cases:
    """Yield a name and a launch on meta tensors; width 100 is no multiple of a tile or vector."""
    M, F = 4096, 2048
    cases = [
        ("relu", BF16, F, DROPOUT),
        ("gelu", BF16, F, DROPOUT),
        ("gelu", FP16, F, 0.0),
        ("gelu", FP32, F, DROPOUT),
        ("gelu", BF16, 100, DROPOUT),
        ("gelu_tanh", BF16, F, DROPOUT),
        ("geglu", BF16, F, DROPOUT),
        ("geglu", FP32, F, DROPOUT),
        ("swiglu", BF16, F, 0.0),
        ("reglu", BF16, F, DROPOUT),
    ]
    for activation, dtype, width, dropout_p in cases:
        name = f"{activation} {_name(dtype)} F {width}{' dropout' if dropout_p else ''}"
        wide = 2 * width if feed_forward.FORMS[activation][1] else width
        h, seed, da = meta(M, wide, dtype=dtype), _seed(dropout_p), meta(M, width, dtype=dtype)
        yield f"{name} forward", partial(feed_forward.activate, h, seed, activation, dropout_p)
        backward = partial(feed_forward.activate_backward, da, h, seed, activation, dropout_p, True, True)
        yield f"{name} backward", backward
    for dtype, width in ((BF16, F), (FP32, F), (BF16, 100)):
        da, a = (meta(M, width, dtype=dtype) for _ in range(2))
        yield f"relu {_name(dtype)} F {width} from a", partial(feed_forward.relu_backward, da, a, DROPOUT, True)


def embedding_cases() -> Cases:
    M, V, P = 4096, 16000, 512
    cases = [
        (BF16, 512, True, DROPOUT),
        (BF16, 512, False, 0.0),
        (FP32, 512, True, DROPOUT),
        (BF16, 4096, True, DROPOUT),
        (BF16, 100, True, DROPOUT),
    ]
    for dtype, width, has_positions, dropout_p in cases:
        name = f"{_name(dtype)} D {width}{' dropout' if dropout_p else ''}"
        ids, seed = meta(M, dtype=torch.int64), _seed(dropout_p)
        positions = (ids, meta(P, width, dtype=dtype)) if has_positions else (None, None)
        inputs = (ids, meta(V, width, dtype=dtype), *positions, seed, 22.6, dropout_p)
        yield f"{name}{' positions' if has_positions else ''} forward", partial(embedding.embedding, *inputs)
        dout = meta(M, width, dtype=dtype)
        yield f"{name} backward", partial(embedding.backward, dout, ids, seed, V, 22.6, dropout_p, dtype)


def rotary_cases() -> Cases:
    T, P = 4096, 2048
    # dtypes of x and tables, heads of queries and keys, heads of values after them, K, R, interleaved
    cases = [
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
    for dtype, tables, H, others, K, R, interleaved in cases:
        name = f"{_name(dtype)} H {H} K {K}{f' R {R}' if R < K else ''}"
        name += f"{' interleaved' if interleaved else ''}{' fp64 tables' if tables == FP64 else ''}"
        x = meta(T, H + others, K, dtype=dtype)[:, :H]
        cos, sin = (meta(P, R // 2, dtype=tables) for _ in range(2))
        yield name, partial(rotary.rotary, x, meta(T, dtype=torch.int64), cos, sin, interleaved, 1.0)


def linear_cross_entropy_cases() -> Cases:
    everything, nothing = [True] * 3, [False] * 3

    def inputs(dtype: torch.dtype, V: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        x, weight = (meta(rows, 512, dtype=dtype) for rows in (1000, V))
        return x, weight, meta(V, dtype=dtype) if bias else None, meta(1000, dtype=torch.int64)

    def forward(dtype: torch.dtype, V: int, bias: bool, smoothing: float, wanted: list[bool]) -> Callable[[], object]:
        return lambda: linear_cross_entropy.forward(*inputs(dtype, V, bias), -100, smoothing, wanted)

    for dtype in (BF16, FP16, FP32):
        yield f"{_name(dtype)} V=32768 bias smooth", forward(dtype, 32768, True, 0.1, everything)
    yield "bfloat16 V=32768", forward(BF16, 32768, False, 0.0, everything)
    yield "bfloat16 V=50257 bias smooth", forward(BF16, 50257, True, 0.1, everything)
    yield "bfloat16 V=1000 bias smooth", forward(BF16, 1000, True, 0.1, everything)
    backward = (meta(1000), *inputs(BF16, 32768, True), -100, 0.1, everything)
    yield "bfloat16 V=32768 bias smooth none", lambda: linear_cross_entropy.backward(*backward)
    yield "bfloat16 V=32768 bias smooth loss", forward(BF16, 32768, True, 0.1, nothing)
    yield "float32 V=32768 loss", forward(FP32, 32768, False, 0.0, nothing)
