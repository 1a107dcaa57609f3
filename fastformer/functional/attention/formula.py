"""Attention written out, scores and all, and how SDPA's gradient falls back on it where that is differentiated again.

Letters: B batch, H heads, T queries, S keys, K head size.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastformer.host.devices import autocasts, product_dtype
from fastformer.modes import compiling, current_node, dispatch_modes, functorch_level, saved_tensors_hooks

# The node of autograd of SDPA's one fused op on a CPU; its inputs are q, k, v, and a mask has no gradient.
_FUSED_ON_CPU = "ScaledDotProductFlashAttentionForCpuBackward0"


def scores_to_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k^T) + mask), cap(x) = softcap * tanh(x / softcap): `[B, H, T, S]`.

    A sink is a score more in each row of its head, of which no weight is returned. What is added to scores of 16 bits
    is added in fp32, where the sums still differ as the scores do.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, H, T, _ = q.shape
    # Flattened before the transpose: bmm reads transposed keys as they are, where matmul would copy them.
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
    if weights.is_cuda and autocasts(weights):  # which has softmax in fp32
        return weights
    return weights.to(product_dtype(q))


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q k^T of `[N, T, K]` and `[N, S, K]`; those of fp16 are fp32.

    As SDPA has them: fp16 has no numbers beyond 65,504, neither for a score, nor for one below its lowest as a mask,
    nor for what is divided by a wide softcap.
    """
    if product_dtype(q) == torch.float16:
        with torch.autocast(q.device.type, enabled=False) if autocasts(q) else nullcontext():
            return products(q.float(), k.float(), scale)
    # With beta 0, its derivative in forward mode ends the process under a TorchDispatchMode (torch 2.13); of bf16 and
    # scale 0, too, it writes nothing.
    beta = 0 if scale and (compiling() or not dispatch_modes()) else 1
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=beta, alpha=scale)


def wide(x: Tensor) -> Tensor:
    """x, in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values `[B, Hkv, S, K]` as those of each of so many heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def differentiable_twice(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """SDPA's output for these inputs, with a gradient that takes the formula where it is to be differentiated.

    torch's fused attention, on every device, has no second derivative.
    """
    if functorch_level() is not None:
        return _Transformable.apply(out, q, k, v, mask, causal, scale)  # type: ignore[no-any-return, no-untyped-call]
    node = out.grad_fn
    # Hooks of saved tensors may give each only once, as those of torch.utils.checkpoint do.
    if node is None or node.name() != _FUSED_ON_CPU or saved_tensors_hooks(True) is not None:
        return _Passing.apply(out, q, k, v, mask, causal, scale)  # type: ignore[no-any-return, no-untyped-call]
    # Half of what a Function around it takes, which is a twelfth of a module's training step with 14 tokens.
    node.register_hook(_replaced)
    return out


def _replaced(found: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """Instead of what SDPA's node found, and only where that is to be differentiated, what the formula finds."""
    node: Any = current_node()  # asked for what it keeps: nothing is kept for longer
    # Compiled autograd runs the hook, and no node.
    if not torch.is_grad_enabled() or grads[0] is None or node is None or node.name() != _FUSED_ON_CPU:
        return None
    inputs = [node._saved_query, node._saved_key, node._saved_value, node._saved_attn_mask]
    wanted = [i for i, x in enumerate(found) if x is not None]
    by_place = _gradients(inputs, wanted, node._saved_is_causal, node._saved_scale, grads[0])
    return tuple(by_place.get(i) for i in range(len(found)))


def _gradients(
    inputs: Sequence[Any], wanted: list[int], causal: bool, scale: float | None, grad: Tensor
) -> dict[int, Tensor]:
    """The gradients of q, k, v and mask by their places, of those that are wanted; with derivatives of their own."""
    # Views: each gradient is that of one place, not of the others where the same tensor is given.
    places: list[Any] = [x if x is None else x.view_as(x) for x in inputs]
    if causal:
        T, S = places[0].shape[-2], places[1].shape[-2]
        places[3] = torch.ones(T, S, dtype=torch.bool, device=grad.device).tril()

    def formula(*given: Tensor) -> Tensor:
        by_place = dict(zip(wanted, given, strict=True))
        q, k, v, mask = (by_place.get(i, x) for i, x in enumerate(places))
        weights = scores_to_weights(q, repeat_heads(k, q.shape[1]), mask, scale)
        return torch.matmul(weights, repeat_heads(v, q.shape[1]))

    chosen = [places[i] for i in wanted]
    if functorch_level() is None:
        out = formula(*chosen)
        found = torch.autograd.grad(out, chosen, grad.to(out.dtype), create_graph=True)
    else:  # autograd.grad knows nothing of the levels of torch.func: a Hessian is one inside another
        out, pull_back = torch.func.vjp(formula, *chosen)  # type: ignore[misc]
        found = pull_back(grad.to(out.dtype))
    return dict(zip(wanted, found, strict=True))


class _Passing(torch.autograd.Function):
    """Passes SDPA's output and gradient through, but for a gradient that is to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _remember(ctx, inputs)
        return inputs[0].view_as(inputs[0])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads[0], None, None, None, None, None, None
        wanted = [i for i in range(4) if ctx.needs_input_grad[1 + i]]
        by_place = _gradients(ctx.saved_tensors, wanted, ctx.causal, ctx.scale, grads[0])
        return None, *(by_place.get(i) for i in range(4)), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return tangents[0].view_as(tangents[0])  # type: ignore[no-any-return]


class _Transformable(_Passing):
    """The same in the form that torch.func wants, which takes 83 us a call where the other takes 23."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return inputs[0].view_as(inputs[0])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs)


def _remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """inputs: out, q, k, v, mask, causal, scale."""
    *tensors, ctx.causal, ctx.scale = inputs[1:]
    ctx.save_for_backward(*tensors)
