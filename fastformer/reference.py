"""The specification of every op, in plain PyTorch: any device, any dtype, double backward.

As fast as PyTorch's own ops allow, and the place where edge cases are decided:

- A query that may attend to nothing gives output 0 and gradient 0 (torch gives NaN in some paths).
- Statistics, softmax and losses accumulate as torch's own ops do for the dtype.
- Dropout draws from torch's generators. On a CPU it takes 16 random bits an element instead of torch's Bernoulli
  sampling, which costs as much as the matrix product beside it (3000 x 2048 elements: 59 ms against 6 ms of random
  bits, one core); the keep probability is quantised to 1/65536 and the quantised value is used in the scale.

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, M rows, V vocabulary.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.chunked_cross_entropy import ChunkedCrossEntropy, plain_loss
from fastformer.packing import Layout, gather_slots, pack, scatter_slots, unpack

Activation = Literal["relu", "gelu", "gelu_tanh", "geglu", "swiglu", "reglu"]
Alignment = Literal["top_left", "bottom_right"]
Reduction = Literal["mean", "sum", "none"]

_LEVELS = 1 << 16


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p)."""
    if p == 0.0:
        return x
    if x.device.type != "cpu" or p == 1.0 or torch.compiler.is_compiling():
        return F.dropout(x, p)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    # All 64 bits are random: random_() without bounds leaves the sign bit 0.
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
    return x * keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))


def allowed_positions(
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    causal: bool,
    alignment: Alignment,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor | None:
    """Combine causality, lengths and key mask into one bool mask, True = may attend, broadcastable to `[B, 1, T, S]`.

    Args:
        shape: (B, T, S).
    """
    if not causal and query_lengths is None and key_lengths is None and key_mask is None:
        return None
    _, T, S = shape
    queries, keys = torch.arange(T, device=device)[:, None], torch.arange(S, device=device)  # [T, 1], [S]
    allowed = None
    if causal:
        shift: Tensor | int = 0
        if alignment == "bottom_right":
            ends = key_lengths[:, None, None, None] if key_lengths is not None else S
            starts = query_lengths[:, None, None, None] if query_lengths is not None else T
            shift = ends - starts  # [B, 1, 1, 1] or a number
        allowed = keys <= queries + shift
    if key_lengths is not None:
        real = keys < key_lengths[:, None, None, None]  # [B, 1, 1, S]
        allowed = real if allowed is None else allowed & real
    if key_mask is not None:
        real = key_mask[:, None, None, :]
        allowed = real if allowed is None else allowed & real
    if query_lengths is not None:
        real = queries < query_lengths[:, None, None, None]  # [B, 1, T, 1]
        allowed = real if allowed is None else allowed & real
    return allowed


def _guard(mask: Tensor | None, allowed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Merge an arbitrary mask with the allowed positions.

    Returns:
        The merged mask, opened at the queries that may attend to nothing so that no NaN arises there, and those
        queries as a bool mask `[..., T, 1]` whose outputs must be set to 0. Either may be None.
    """
    if mask is None and allowed is None:
        return None, None
    if mask is None or mask.dtype == torch.bool:
        open_ = mask if allowed is None else allowed if mask is None else mask & allowed
        assert open_ is not None
        dead = ~open_.any(-1, keepdim=True)
        return open_ | dead, dead
    if allowed is not None:
        mask = torch.where(allowed, mask, -math.inf)
    dead = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(dead, 0.0), dead


def _scores_to_weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """softmax(scale * q k^T + mask): `[B, H, T, S]`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, T, _ = q.shape
    # Flattened before the transpose: bmm reads transposed keys as they are, where matmul would copy them.
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    scores = scores.view(B, H, T, k.shape[1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return scores.softmax(-1)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class _PlainDoubleBackward(torch.autograd.Function):
    """Passes SDPA's output and gradient through; a gradient that is to be differentiated takes the plain formula.

    torch's fused attention, on every device, has no second derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, q, k, v, mask, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads[0], None, None, None, None, None, None
        q, k, v, mask = ctx.saved_tensors
        inputs = [x for x, wanted in zip((q, k, v, mask), ctx.needs_input_grad[1:5], strict=True) if wanted]
        if ctx.causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        weights = _scores_to_weights(q, _repeat_heads(k, q.shape[1]), mask, ctx.scale)
        out = torch.matmul(weights, _repeat_heads(v, q.shape[1]))
        found = iter(torch.autograd.grad(out, inputs, grads[0].to(out.dtype), create_graph=True))
        return None, *(next(found) if wanted else None for wanted in ctx.needs_input_grad[1:5]), None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    allowed: Tensor | None,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    Args:
        q: `[B, H, T, K]`.
        k: `[B, Hkv, S, K]`; v: `[B, Hkv, S, Kv]`. Hkv divides H.
        mask: bool (True = attend) or additive, broadcastable to `[B, H, T, S]`.
        allowed: bool, from `allowed_positions`.
        causal: top-left causality on top of `mask` and `allowed`; only where both are None.
        dropout_p: of the attention weights.
        scale: K ** -0.5 if None.

    Returns:
        `[B, H, T, Kv]`.
    """
    if k.shape[-2] == 0:  # nothing to attend to
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)  # zeros, with gradients
    if dropout_p > 0.0 and q.device.type == "cpu":
        # SDPA on a CPU has no fused path with dropout, and the weights' random bits are cheaper here.
        if causal:
            allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return attention_with_weights(q, k, v, mask, allowed, dropout_p=dropout_p, scale=scale)[0]
    merged, dead = _guard(mask, allowed)
    if merged is not None and merged.is_floating_point():
        merged = merged.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, merged, dropout_p, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    if out.requires_grad and dropout_p == 0.0 and not torch.compiler.is_compiling():
        out = _PlainDoubleBackward.apply(out, q, k, v, merged, causal, scale)  # type: ignore[no-untyped-call]
    return out if dead is None else out.masked_fill(dead, 0.0)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    allowed: Tensor | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied (after dropout, as torch returns them)."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    merged, dead = _guard(mask, allowed)
    weights = _scores_to_weights(q, k, merged, scale)
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    weights = dropout(weights, dropout_p)
    return torch.matmul(weights, v), weights


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention within each of B packed sequences: q `[T, H, K]`, k and v `[S, Hkv, K]` -> `[T, H, Kv]`.

    Padding exists only inside this op: the scores are a few percent of a Transformer's work at the lengths where
    padding matters, and a padded batch of them is one matrix product.
    """
    T, S = layout.max_length, key_layout.max_length
    if max(T, S) <= _SHORT and key_layout.shortest > 0 and k.shape[1] == q.shape[1]:
        return _short_packed_attention(q, k, v, layout, key_layout, causal=causal, dropout_p=dropout_p, scale=scale)
    q, k, v = (unpack(x, y).transpose(1, 2) for x, y in ((q, layout), (k, key_layout), (v, key_layout)))  # [B, H, L, K]
    # Causal self-attention needs no lengths: the keys up to a real query are real.
    alone = key_layout.full or (causal and layout is key_layout)
    allowed = None
    if not alone:
        allowed = allowed_positions(
            (layout.batch, T, S),
            q.device,
            causal=causal,
            alignment="top_left",
            query_lengths=None,
            key_lengths=key_layout.offsets.diff(),
            key_mask=None,
        )
    out = attention(q, k, v, None, allowed, causal=causal and alone, dropout_p=dropout_p, scale=scale)
    return pack(out.transpose(1, 2), layout)


# Up to this length matrix product and softmax beat SDPA on a CPU, forward and backward (128 sequences of up to 29
# tokens, 6 heads of 32: 13.6 against 18.0 ms, one core); beyond it the scores no longer stay in the cache.
_SHORT = 64


def _short_packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    key_layout: Layout,
    *,
    causal: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """`packed_attention` with the heads in front: spreading the tokens is then also the copy that bmm needs."""
    B, T, S, H, K = layout.batch, layout.max_length, key_layout.max_length, q.shape[1], q.shape[2]
    q, k, v = (
        scatter_slots(x.transpose(0, 1), y, 1).view(H * B, y.max_length, x.shape[2])
        for x, y in ((q, layout), (k, key_layout), (v, key_layout))
    )  # [H * B, L, K]
    scale = K**-0.5 if scale is None else scale
    bias = torch.zeros((), device=q.device)
    if causal:
        bias = torch.full((T, S), -math.inf, device=q.device).triu_(1)
    if not key_layout.full and not (causal and layout is key_layout):
        bias = bias + key_layout.key_bias
    wide = bias.to(q.dtype).expand(H, B, T, S).reshape(H * B, T, S)
    weights = torch.baddbmm(wide, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    out = torch.bmm(dropout(weights, dropout_p), v)  # [H * B, T, Kv]
    return gather_slots(out.view(H, B * T, v.shape[2]), layout, 1).transpose(0, 1)


def layer_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions (Ba et al. 2016)."""
    return F.layer_norm(x, shape, weight, bias, eps)


def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, shape, weight, eps)


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """The sum s = residual + dropout(x) and its layer norm: (norm(s), s)."""
    total = residual + dropout(x, dropout_p)
    return layer_norm(total, shape, weight, bias, eps), total


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation; the gated forms take `[..., 2F]` = (gate, value) to `[..., F]` (Shazeer 2020)."""
    match activation:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    gate, value = x.chunk(2, -1)
    match activation:
        case "geglu":
            return F.gelu(gate) * value
        case "swiglu":
            return F.silu(gate) * value
        case "reglu":
            return F.relu(gate) * value


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: Activation,
    dropout_p: float,
) -> Tensor:
    """dropout(activation(x weight1^T + bias1)) weight2^T + bias2."""
    hidden = F.linear(x, weight1, bias1)
    # In place where nothing else needs the argument: one pass over the widest tensor of a layer less.
    hidden = F.relu_(hidden) if activation == "relu" else activate(hidden, activation)
    return F.linear(dropout(hidden, dropout_p), weight2, bias2)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: Reduction,
) -> Tensor:
    """Cross entropy of softmax(x weight^T + bias): x `[M, D]`, weight `[V, D]`, target `[M]`."""
    if torch.is_autocast_enabled(x.device.type):
        # Custom Functions do not see autocast; F.linear, inside, obeys it.
        x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if reduction == "none":
        return plain_loss(x, weight, bias, target, ignore_index, label_smoothing)
    loss: Tensor = ChunkedCrossEntropy.apply(x, weight, bias, target, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    return loss if reduction == "sum" else loss / (target != ignore_index).sum()
