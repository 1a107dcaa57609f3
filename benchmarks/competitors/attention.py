"""Competitors of fastformer's attention.

All functions take q, k and v, `[B, H, L, D]`, and return the output. Masks and offsets are made beforehand and not
timed, unless the function says so.

Users of SDPA combine padding with causality in three ways: `MASK`, one bool mask `[B, 1, L, L]`; `KEY_MASK`, a bool
mask `[B, 1, 1, L]` with `is_causal`, which the math backend refuses and torch's documentation rules out, though the
CPU's flash kernel takes both; `ALONE`, `is_causal` without a mask, which is right at all real positions if padding is
on the right.

Letters: B batch, H heads, L positions, D head size, N real positions of all sequences.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.competitors.known import compiled
from benchmarks.harness.attention_case import AttentionCase
from fastformer.packing import pack, unpack

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MASK, KEY_MASK, ALONE = "mask (B,1,L,L)", "key mask (B,1,1,L)", "is_causal alone"

_BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


def sdpa(p: AttentionCase, backend: str, way: str | None) -> Attention:
    """Return scaled_dot_product_attention on one backend; `way` is `MASK`, `KEY_MASK`, `ALONE` or None: no padding."""
    mask = None
    if p.alibi:  # with causality in it: SDPA takes one or the other
        mask = torch.where(p.allowed(), p.dense_bias(), -math.inf).to(p.dtype).expand(p.batch, -1, -1, -1)
    elif way == MASK:
        mask = p.allowed().expand(-1, -1, p.length, -1)
    elif way == KEY_MASK:
        mask = p.real[:, None, None, :]
    causal = p.causal and way != MASK

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(_BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, mask, p.dropout, is_causal=causal)

    return run


def tutorial(p: AttentionCase) -> Attention:
    """Return softmax(q k^T / sqrt(D)) v with the scores in memory and a mask of 0 and 1, as tutorials write it."""
    mask = (~p.look_ahead)[None, None].int() if p.causal else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(p.head_size)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(scores.softmax(-1), v)

    return run


def allowed_pair(lengths: Tensor, causal: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return flex_attention's mask: whether query i of row b may attend to key j."""

    def real_keys(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < lengths[b]

    def real_earlier_keys(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < lengths[b]) & (i >= j)

    return real_earlier_keys if causal else real_keys


@cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    # Beyond its limit of compilations, Dynamo would run the plain code without a word.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return compiled(flex_attention, keeps=True), torch.compile(create_block_mask, dynamic=False)


def flex(p: AttentionCase, per_batch: bool, plain: bool = False) -> Attention:
    """Return flex_attention with a block mask, made beforehand or, `per_batch`, within each call.

    `plain` is not compiled and tests the code; torch has no backward of it on a CPU.
    """
    attend: Callable[..., Any] = flex_attention
    make: Callable[..., Any] = create_block_mask
    if not plain:
        attend, make = _compiled_flex()

    pair = allowed_pair(p.lengths_on_device, p.causal)

    def block_mask() -> Any:
        return make(pair, p.batch, None, p.length, p.length, device=str(p.device))

    ready = None if per_batch else block_mask()

    def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[h, p.length - 1 + j - i]

    bias, score_mod = p.distance_bias, by_distance if p.alibi else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score_mod, block_mask=block_mask() if ready is None else ready)

    return run


def causal_arguments(varlen: Callable[..., Any], causal: bool) -> dict[str, Any]:
    """Return the arguments for causality of this torch's varlen_attn: `is_causal` in older ones, later a window."""
    if "is_causal" in inspect.signature(varlen).parameters:
        return {"is_causal": causal}
    return {"window_size": (-1, 0) if causal else (-1, -1)}


@lru_cache(maxsize=1)
def packed(p: AttentionCase, name: str) -> Attention:
    """Return attention of packed sequences, `[N, H, D]` -> `[N, H, D]`, by "varlen", "flash-attn" or "xformers"."""
    lengths = p.lengths.tolist()
    offsets, longest = p.layout.offsets.int(), p.length
    if name == "xformers":
        ops = importlib.import_module("xformers.ops")
        kinds = ops.fmha.attn_bias
        kind = kinds.BlockDiagonalCausalMask if p.causal else kinds.BlockDiagonalMask
        bias = kind.from_seqlens(lengths)

        def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ops.memory_efficient_attention(q[None], k[None], v[None], attn_bias=bias)[0]

        return blocks
    if name == "flash-attn":
        attend, arguments = importlib.import_module("flash_attn").flash_attn_varlen_func, {"causal": p.causal}
    else:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        arguments = causal_arguments(attend, p.causal)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, offsets, offsets, longest, longest, **arguments)

    return run


def unpadded(p: AttentionCase, attend: Attention) -> Attention:
    """Return `attend` for padded tensors: pack real positions, attend, unpack with zeros at padding.

    Uses fastformer's gather in both directions: indexing, as most write it, has a slow backward.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(*(pack(x.transpose(1, 2), p.layout) for x in (q, k, v)))
        return unpack(out, p.layout).transpose(1, 2)

    return run


@lru_cache(maxsize=1)  # for all directions: flex_attention may be compiled again for another mask, which takes seconds
def rival(p: AttentionCase, name: str, way: str | None = None) -> Attention:
    """Return a competitor's attention of padded tensors, by its key of `COMPETITORS`; `way` as in `sdpa`."""
    if name in _BACKENDS:
        return sdpa(p, name, way)
    if name == "tutorial":
        return tutorial(p)
    if name.startswith("flex"):
        return flex(p, per_batch=name == "flex-per-batch", plain=p.device.type == "cpu")
    return unpadded(p, packed(p, name))
