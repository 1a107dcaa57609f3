"""The specification of every op, in plain PyTorch: any device, any dtype, double backward.

As fast as PyTorch's own ops allow, and the place where edge cases are decided:

- A query that may attend to nothing gives output 0 and gradient 0 (torch gives NaN in some paths).
- Statistics, softmax and losses accumulate as torch's own ops do for the dtype.
- Numbers are torch's, also where they depend on the CPU: gelu(inf) is NaN where oneDNN runs its AVX-512 code, and inf
  elsewhere. The kernels compute the formula, inf.
- Dropout draws from torch's generators; on a CPU 16 random bits an element, as torch's Bernoulli sampling costs as much
  as the matrix product beside it (docs/kernels/shared.md). The keep probability is quantised to 1/65536, and the
  quantised value is used in the scale.

Letters: B batch, H heads, T queries, S keys, D model width, K head size, F feed-forward width, M rows, V vocabulary.
"""

import math
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastformer.arguments import Activation, AttentionRules, Reduction
from fastformer.blank_padding import blank_padding
from fastformer.chunked_cross_entropy import ChunkedCrossEntropy, plain_loss
from fastformer.host.devices import autocasts
from fastformer.query_blocks import attend_in_blocks, rows_at_once

_LEVELS = 1 << 16


def _transformed() -> bool:
    """Whether torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p)."""
    if p == 0.0:
        return x
    # vmap may ask for other numbers in each row, and bits that are drawn here belong to no row.
    if x.device.type != "cpu" or p == 1.0 or torch.compiler.is_compiling() or _transformed():
        return F.dropout(x, p)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    # All 64 bits are random: random_() without bounds leaves the sign bit 0.
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
    return x * keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))


def allowed_positions(q: Tensor, k: Tensor, rules: AttentionRules) -> Tensor | None:
    """Combine causality, window, lengths and key mask into one bool mask, True = may attend.

    Args:
        q: `[B, H, T, K]`; k: `[B, Hkv, S, K]`.
        rules: all but its mask.

    Returns:
        Broadcastable to `[B, 1, T, S]`; None where nothing limits.
    """
    T, S = q.shape[2], k.shape[2]
    queries, keys = torch.arange(T, device=q.device)[:, None], torch.arange(S, device=q.device)  # [T, 1], [S]
    query_ends, key_ends = (
        None if x is None else x[:, None, None, None] for x in (rules.query_lengths, rules.key_lengths)
    )  # [B, 1, 1, 1]
    left, right = rules.band
    allowed: list[Tensor] = []
    if left is not None or right is not None:
        centre = queries
        if rules.alignment == "bottom_right":
            centre = queries + ((S if key_ends is None else key_ends) - (T if query_ends is None else query_ends))
        if right is not None:
            allowed.append(keys <= centre + right)
        if left is not None:
            allowed.append(keys >= centre - left)
    if key_ends is not None:
        allowed.append(keys < key_ends)
    if rules.key_mask is not None:
        allowed.append(rules.key_mask[:, None, None, :])
    if query_ends is not None:
        allowed.append(queries < query_ends)
    return reduce(torch.logical_and, allowed) if allowed else None


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


def _scores_to_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, softcap: float | None = None
) -> Tensor:
    """softmax(cap(scale * q k^T) + mask), cap(x) = softcap * tanh(x / softcap): `[B, H, T, S]`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, T, _ = q.shape
    # Flattened before the transpose: bmm reads transposed keys as they are, where matmul would copy them.
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    scores = scores.view(B, H, T, k.shape[1])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
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
        # Views: each gradient is that of one place, not of the others where the same tensor is given.
        places: list[Any] = [x if x is None else x.view_as(x) for x in ctx.saved_tensors]
        q, k, v, mask = places
        inputs = [x for x, wanted in zip((q, k, v, mask), ctx.needs_input_grad[1:5], strict=True) if wanted]
        if ctx.causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        weights = _scores_to_weights(q, _repeat_heads(k, q.shape[1]), mask, ctx.scale)
        out = torch.matmul(weights, _repeat_heads(v, q.shape[1]))
        found = iter(torch.autograd.grad(out, inputs, grads[0].to(out.dtype), create_graph=True))
        return None, *(next(found) if wanted else None for wanted in ctx.needs_input_grad[1:5]), None, None


def _only_causal(rules: AttentionRules) -> bool:
    """Whether SDPA's `is_causal` says all about who attends to whom."""
    others = (rules.mask, rules.window, rules.query_lengths, rules.key_lengths, rules.key_mask)
    return rules.causal and rules.alignment == "top_left" and all(x is None for x in others)


def attention(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """softmax(scale * q k^T + mask) v (Vaswani et al. 2017, equation 1).

    Args:
        q: `[B, H, T, K]`.
        k: `[B, Hkv, S, K]`; v: `[B, Hkv, S, Kv]`. Hkv divides H.
        rules: from `check_attention`.

    Returns:
        `[B, H, T, Kv]`.
    """
    if k.shape[-2] == 0:  # nothing to attend to
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        return torch.matmul(torch.matmul(q, k.transpose(-1, -2)), v)  # zeros, with gradients
    q, k, v = blank_padding(q, k, v, rules)
    # SDPA has no softcap; on a CPU it has no fused path with dropout, and the weights' random bits are cheaper here.
    weighs = rules.softcap is not None or (rules.dropout_p > 0.0 and q.device.type == "cpu")
    attend = _weigh if weighs else _attend
    rows = q.shape[2] if _only_causal(rules) and not weighs else rows_at_once(q, k, rules, weighs)
    return attend(q, k, v, rules) if rows >= q.shape[2] else attend_in_blocks(attend, q, k, v, rules, rows)


def _weigh(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    return _apply_weights(q, k, v, rules)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> Tensor:
    """`attention` with SDPA."""
    dropout_p, scale, causal = rules.dropout_p, rules.scale, _only_causal(rules)
    merged, dead = _guard(rules.mask, None if causal else allowed_positions(q, k, rules))
    if merged is not None and merged.is_floating_point():
        merged = merged.to(q.dtype)
    # A branch, since numbers of heads are symbols to a compiler that meets the model sharded.
    grouped = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    out = F.scaled_dot_product_attention(q, k, v, merged, dropout_p, is_causal=causal, scale=scale, **grouped)
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if out.requires_grad and dropout_p == 0.0 and not recorded:
        out = _PlainDoubleBackward.apply(out, q, k, v, merged, causal, scale)  # type: ignore[no-untyped-call]
    return out if dead is None else out.masked_fill(dead, 0.0)


def attention_with_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    """Like `attention`, and the weights `[B, H, T, S]` that were applied (after dropout, as torch returns them)."""
    return _apply_weights(*blank_padding(q, k, v, rules), rules)


def _apply_weights(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules) -> tuple[Tensor, Tensor]:
    merged, dead = _guard(rules.mask, allowed_positions(q, k, rules))
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    weights = _scores_to_weights(q, k, merged, rules.scale, rules.softcap)
    if dead is not None:
        weights = weights.masked_fill(dead, 0.0)
    weights = dropout(weights, rules.dropout_p)
    return torch.matmul(weights, v), weights


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
    recompute: bool = False,
) -> Tensor:
    """dropout(activation(x weight1^T + bias1)) weight2^T + bias2; `recompute`: again in backward, instead of kept."""
    if recompute and torch.is_grad_enabled():
        plain = partial(feed_forward, activation=activation, dropout_p=dropout_p)
        out: Tensor = checkpoint(plain, x, weight1, bias1, weight2, bias2, use_reentrant=False)
        return out
    hidden = F.linear(x, weight1, bias1)
    # In place where nothing else needs the argument: one pass over the widest tensor of a layer less.
    hidden = F.relu_(hidden) if activation == "relu" else activate(hidden, activation)
    return F.linear(dropout(hidden, dropout_p), weight2, bias2)


def embedding(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    positions: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """dropout(scale * weight[ids] + table[positions]): ids and positions `[...]` -> `[..., D]`."""
    x = F.embedding(ids, weight) * scale
    if table is not None and positions is not None:
        x = x + F.embedding(positions, table)
    return dropout(x, dropout_p)


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
    if autocasts(x):
        # Custom Functions do not see autocast; F.linear, inside, obeys it.
        x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    given = (x, weight) if bias is None else (x, weight, bias)
    # What torch.func takes is plain, and so is what keeps the classes of tensors.
    if reduction == "none" or _transformed() or torch.overrides.has_torch_function(given):
        losses = plain_loss(x, weight, bias, target, ignore_index, label_smoothing)
        loss = losses if reduction == "none" else losses.sum()
    else:
        loss = ChunkedCrossEntropy.apply(x, weight, bias, target, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    return mean_of_targets(loss, target, ignore_index) if reduction == "mean" else loss


def mean_of_targets(total: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Divide a sum of losses by the targets that count: of none NaN, with gradients 0, as in torch."""
    count = (target != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan)
