"""Attention weights written out: scores, softcap, masks, sinks and softmax.

Letters: B batch, H heads, T queries, S keys, K head size.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fastformer.host.devices import autocasts, product_dtype
from fastformer.modes import compiling, dispatch_modes

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def scores_to_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(cap(scale * q k^T) + mask), cap(x) = softcap * tanh(x / softcap): `[B, H, T, S]`.

    A sink is one more score in each row of its head; its weight is not returned. An additive mask is added to 16-bit
    scores in fp32, which keeps the differences between scores. If `widens(q)`, the weights are fp32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, T, _ = q.shape
    # Flattened before the transpose: bmm reads transposed keys in place, where matmul would copy them.
    scores = products(q.flatten(0, 1), k.flatten(0, 1), scale).view(B, H, T, k.shape[2])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else wide(scores) + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sunk = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(B, H, T, 1)], -1)
        weights = sunk.softmax(-1)[..., :-1]
    if widens(q) or (weights.is_cuda and autocasts(weights)):  # autocast on a GPU runs softmax in fp32
        return weights
    return weights.to(product_dtype(q))


def widens(x: Tensor) -> bool:
    """Return whether products with x are computed in fp32 and rounded once: 16-bit products on a CPU.

    SDPA keeps scores and sums in fp32. With scores and weights rounded to bf16, the error was 2 to 14 times SDPA's.
    """
    return x.is_cpu and product_dtype(x) in _SIXTEEN_BITS


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * q k^T of `[N, T, K]` and `[N, S, K]`; in fp32 if `widens(q)` or q is fp16.

    SDPA does so too. fp16 ends at 65,504: large scores exceed it, as do scores plus a mask of fp16's lowest number, and
    large softcaps.
    """
    dtype = product_dtype(q)
    if dtype == torch.float16 or (q.is_cpu and dtype in _SIXTEEN_BITS):
        with _without_autocast(q):
            return products(q.float(), k.float(), scale)
    # With beta 0, the forward-mode derivative aborts the process under a TorchDispatchMode (torch 2.13); in bf16 with
    # scale 0, baddbmm does not write its output.
    beta = 0 if scale and (compiling() or not dispatch_modes()) else 1
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=beta, alpha=scale)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights @ v of `[..., T, S]` and `[..., S, Kv]`, computed in fp32 and then rounded if `widens(v)`."""
    if not widens(v):
        return torch.matmul(weights, v)
    with _without_autocast(v):
        out = torch.matmul(weights.float(), v.float())
    return out.to(product_dtype(v))


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def wide(x: Tensor) -> Tensor:
    """Return x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[B, Hkv, S, K]` to `[B, heads, S, K]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
