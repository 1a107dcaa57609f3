"""Attention: each tile size that the launchers choose, with the fewest and with the most options."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.codegen.cases import meta
from fastformer_kernels.attention import backward as attention_backward
from fastformer_kernels.attention import bias_gradient as attention_bias_gradient
from fastformer_kernels.attention import decode as attention_decode
from fastformer_kernels.attention import forward as attention
from fastformer_kernels.attention import mask_gradient as attention_mask_gradient
from fastformer_kernels.attention import problem as attention_problem
from fastformer_kernels.attention import weights as attention_weights
from fastformer_kernels.attention.arguments import Arguments

Call = Callable[[], object]
Options = Callable[[int], Arguments]

B, H = 4, 8
# Sizes of the tiles change at these lengths.
FORWARD = {16: (400, 1024), 32: (400, 1024), 64: (100, 400, 1024), 128: (400, 1024), 256: (1024,)}
BACKWARD = {16: (1024,), 32: (1024,), 64: (400, 1024), 128: (400, 1024), 256: (1024,)}
VALUES = ((64, 128), (192, 128))  # K and V; the latter those of multi-head latent attention
SINGLE = {64: (1024,), 128: (1024,), 256: (1024,)}  # fp32
# Tiles of tf32 are those of 16 bits and twice the head size; beyond 128 there is none.
TF32_FORWARD = {16: (1024,), 32: (100, 400, 1024), 64: (400, 1024), 128: (1024,)}
TF32_BACKWARD = {16: (1024,), 32: (400, 1024), 64: (1024,), 128: (1024,)}


def heads(T: int, K: int, dtype: torch.dtype, V: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as projections leave them."""
    q, k, v = (meta(B, T, H, size, dtype=dtype).transpose(1, 2) for size in (K, K, V or K))
    return q, k, v


def light(T: int) -> Arguments:
    """Return causality and lengths, the arguments of a language model or a decoder."""
    return Arguments(queries=T, keys=T, scale=0.125, right=0, bounds=meta(B, 8, dtype=torch.int32))


def dropped(T: int) -> Arguments:
    """Add dropout, a key mask and a window to `light`."""
    seed, key_mask = meta(1, dtype=torch.int64), meta(B, T, dtype=torch.bool)
    return light(T)._replace(key_mask=key_mask, seed=seed, left=100, dropout_p=0.1)


def heavy(T: int) -> Arguments:
    """Return every option that needs registers: additive mask, key mask, window, softcap and dropout."""
    return dropped(T)._replace(mask=meta(B, 1, T, T), softcap=30.0)


def by_distance(T: int) -> Arguments:
    """Add a bias by distance and sinks to `light`: ALiBi, T5's relative bias."""
    return light(T)._replace(distance_bias=meta(H, 2 * T - 1), sinks=meta(H))


def lse_of(arguments: Arguments, T: int) -> Tensor:
    added = arguments.mask is not None or arguments.distance_bias is not None
    return meta(2, B, H, T) if added else meta(B, H, T)


def forward_case(T: int, K: int, dtype: torch.dtype, options: Options, V: int | None = None) -> Call:
    return partial(attention.forward, *heads(T, K, dtype, V), *options(T))


def backward_case(
    T: int,
    K: int,
    dtype: torch.dtype,
    options: Options,
    V: int | None = None,
    weights: bool = False,
) -> Call:
    q, k, v = heads(T, K, dtype, V)
    arguments = options(T)
    lse, delta = lse_of(arguments, T), meta(B, H, T) if weights else None
    dweights = meta(B, H, T, T, dtype=dtype) if weights else None
    return partial(attention_backward.backward, v, q, k, v, v, lse, delta, dweights, True, True, *arguments)


def smaller_case(name: str, K: int, dtype: torch.dtype, V: int | None = None) -> Call:
    T = 512
    q, k, v = heads(T, K, dtype, V)
    arguments = heavy(T)
    lse, one = lse_of(arguments, T), arguments._replace(queries=1, mask=None, seed=None, dropout_p=0.0)
    match name:
        case "delta":
            nothing = None, None, False, False
            return partial(attention_backward.backward, v, q, k, v, v, lse, *nothing, *arguments)
        case "weights":
            return partial(attention_weights.weights, q, k, lse, *arguments)
        case "mask gradient":
            return partial(attention_mask_gradient.mask_gradient, v, q, k, v, lse, meta(B, H, T), None, *arguments)
        case "decode few":  # keys: one program takes all of them
            few = Arguments(queries=1, keys=128, scale=0.125, bounds=meta(B, dtype=torch.int64))
            return partial(attention_decode.decode, q[:, :, :1], k[:, :, :128], v[:, :, :128], *few)
    return partial(attention_decode.decode, q[:, :, :1], k, v, *one)


def distance_case(name: str, K: int, dtype: torch.dtype) -> Call:
    T = 1024
    q, k, v = heads(T, K, dtype)
    arguments = by_distance(T)
    if name == "decode":
        return partial(attention_decode.decode, q[:, :, :1], k, v, *arguments._replace(queries=1))
    lse = lse_of(arguments, T)
    return partial(attention_bias_gradient.bias_gradient, v, q, k, v, lse, meta(B, H, T), None, *arguments)


def cases_of(
    kind: str, dtype: torch.dtype, forward: Mapping[int, tuple[int, ...]], backward: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[str, Call]]:
    """Yield the cases of one way to multiply."""
    for options in (light, heavy):
        for name, case, sizes in (("forward", forward_case, forward), ("backward", backward_case, backward)):
            for K, lengths in sizes.items():
                for T in lengths if options is light else lengths[-1:]:  # heavy tiles are the same at every length
                    yield f"{name} K {K} T {T} {kind} {options.__name__}", case(T, K, dtype, options)
    for name in ("delta", "weights", "mask gradient", "decode", "decode few"):
        for K in (64, *(each for each in forward if each > 64)):
            yield f"{name} K {K} {kind}", smaller_case(name, K, dtype)


def in_tf32(call: Call) -> Call:
    """Return the call with tf32 enabled for torch's products of fp32."""

    def run() -> object:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def attention_cases() -> Iterator[tuple[str, Call]]:
    """Name and call of every configuration."""
    yield from cases_of("bfloat16", torch.bfloat16, FORWARD, BACKWARD)
    yield from cases_of("float32", torch.float32, SINGLE, SINGLE)
    yield from ((name, in_tf32(call)) for name, call in cases_of("tf32", torch.float32, TF32_FORWARD, TF32_BACKWARD))
    bf16, fp32, both = torch.bfloat16, torch.float32, (("forward", forward_case), ("backward", backward_case))
    for name, case in both:
        yield from ((f"{name} K {K} dropout", case(1024, K, bf16, dropped)) for K in (64, 128, 256))
        yield from ((f"{name} K {K} tf32 dropout", in_tf32(case(1024, K, fp32, dropped))) for K in (64, 128))
        yield from ((f"{name} K {K} by distance", case(1024, K, bf16, by_distance)) for K in (64, 128))
        yield f"{name} K 64 by distance float32", case(1024, 64, fp32, by_distance)
        for K, V in VALUES:
            for options in (light, dropped, heavy):
                yield f"{name} K {K} V {V} {options.__name__}", case(1024, K, bf16, options, V)
        yield f"{name} K 64 V 128 float32", case(1024, 64, fp32, light, 128)
        yield f"{name} K 64 V 128 tf32", in_tf32(case(1024, 64, fp32, light, 128))
    for K in (64, 128):
        yield f"backward K {K} with weights", backward_case(1024, K, bf16, light, weights=True)
        yield f"backward K {K} tf32 with weights", in_tf32(backward_case(1024, K, fp32, light, weights=True))
    for K, V in VALUES:
        for name in ("mask gradient", "decode", "decode few"):
            yield f"{name} K {K} V {V}", smaller_case(name, K, bf16, V)
    for K in (64, 128, 256):
        yield f"bias gradient K {K}", distance_case("bias gradient", K, bf16)
        yield f"decode K {K} by distance", distance_case("decode", K, bf16)
    yield "bias gradient K 64 float32", distance_case("bias gradient", 64, fp32)
    yield "bias gradient K 64 tf32", in_tf32(distance_case("bias gradient", 64, fp32))
    yield "forward K 72, no power of two", forward_case(400, 72, bf16, light)
    each = meta(B, dtype=torch.int64)
    yield (
        "bounds",
        lambda: attention_problem.bounds(each, each, meta(B, 512, dtype=torch.bool), B, 512, 512, False, True, each),
    )
    offsets = meta(B + 1, dtype=torch.int64)
    yield "bounds packed", lambda: attention_problem.bounds(offsets, offsets, None, B, 512, 512, True, False, offsets)
