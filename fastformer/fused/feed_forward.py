"""The fused feed-forward layer: torch's matrix products, and one kernel between them each way.

    h = x weight1^T + bias1        a = dropout(activation(h))        y = a weight2^T + bias2

Kept for backward, beside the weights: x, and a where the activation is ReLU (its zeros say all that h would), else h,
from which the backward kernel makes a once more. Bytes a token in 16 bits: 2 D + 2 F, where plain PyTorch keeps
2 D + 5 F (h, a, and dropout's mask of one byte): 10/22 at F = 4 D. Gated, 2 D + 4 F against 2 D + 9 F: 18/38. With
`recompute` x alone is kept, 2/22 and 2/38, for one more matrix product in backward.

The matrix products stay torch's own: no product with the activation in its epilogue has been measured to be faster.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastformer.autograd_function import call
from fastformer.fused.differentiation import Formula, plain_gradients, to_autocast, twice
from fastformer.fused.registration import define, dropout_seed


def _activate_fake(h: Tensor, seed: Tensor | None, activation: str, dropout_p: float) -> Tensor:
    return h.new_empty(h.shape[0], _hidden_width(h, activation))


def _activate_backward_fake(
    da: Tensor,
    h: Tensor,
    seed: Tensor | None,
    activation: str,
    dropout_p: float,
    wants_a: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    a = h.new_empty(da.shape if wants_a else 0)
    return h.new_empty(h.shape), a, h.new_empty(h.shape[1] if wants_bias else 0)


def _relu_backward_fake(da: Tensor, a: Tensor, dropout_p: float, wants_bias: bool) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape[1] if wants_bias else 0)


_activate = define(
    "feed_forward_activate(Tensor h, Tensor? seed, str activation, float dropout_p) -> Tensor",
    "feed_forward.kernels.activate",
    _activate_fake,
)
_activate_backward = define(
    "feed_forward_activate_backward(Tensor da, Tensor h, Tensor? seed, str activation, float dropout_p, "
    "bool wants_a, bool wants_bias) -> (Tensor, Tensor, Tensor)",
    "feed_forward.kernels.activate_backward",
    _activate_backward_fake,
)
_relu_backward = define(
    "feed_forward_relu_backward(Tensor da, Tensor a, float dropout_p, bool wants_bias) -> (Tensor, Tensor)",
    "feed_forward.kernels.relu_backward",
    _relu_backward_fake,
)


def _hidden_width(h: Tensor, activation: str) -> int:
    return h.shape[1] // 2 if activation.endswith("glu") else h.shape[1]


class _FeedForward(torch.autograd.Function):
    """x `[M, D]` -> (y `[M, Dout]`, what is kept of the hidden activations or None)."""

    @staticmethod
    def forward(
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        seed: Tensor | None,
        activation: str,
        dropout_p: float,
        keeps: bool,
        formula: Formula | None,
    ) -> tuple[Tensor, Tensor | None]:
        h = F.linear(x, weight1, bias1)  # [M, F] or [M, 2F]
        a = _activate(h, seed, activation, dropout_p)  # [M, F]
        kept = (a if activation == "relu" else h) if keeps else None
        del h  # where it is not kept, its memory is free for the second product
        return F.linear(a, weight2, bias2), kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        *tensors, ctx.activation, ctx.dropout_p, _, ctx.formula = inputs
        kept = output[1]
        ctx.save_for_backward(*tensors, kept)
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        rest = (None,) * 5
        if dy is None:
            return *rest, *rest
        x, weight1, bias1, weight2, bias2, seed, kept = ctx.saved_tensors
        if twice(ctx.formula):
            if seed is not None:
                raise RuntimeError("a second derivative of feed_forward with dropout needs backend 'reference'")
            inputs = (x, weight1, bias1, weight2, bias2)
            return *plain_gradients(ctx.formula, inputs, ctx.needs_input_grad[:5], (dy,)), *rest
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        activation, p = ctx.activation, ctx.dropout_p
        h: Any = None if activation == "relu" else kept
        a: Any = kept if activation == "relu" else None
        if kept is None:
            h = F.linear(x, weight1, bias1)
        dx, dweight1, dbias1 = None, None, None
        if needs_x or needs_weight1 or needs_bias1:
            da = torch.mm(dy, weight2)  # [M, F]
            if h is None:
                dh, dbias1 = _relu_backward(da, a, p, needs_bias1)
            else:
                dh, a, dbias1 = _activate_backward(da, h, seed, activation, p, needs_weight2, needs_bias1)
            dx = torch.mm(dh, weight1) if needs_x else None
            dweight1 = torch.mm(dh.t(), x) if needs_weight1 else None
        elif needs_weight2 and h is not None:
            a = _activate(h, seed, activation, p)
        return (
            dx,
            dweight1,
            dbias1 if needs_bias1 else None,
            torch.mm(dy.t(), a) if needs_weight2 else None,
            dy.sum(0) if needs_bias2 else None,
            *rest,
        )


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str,
    dropout_p: float,
    recompute: bool,
    formula: Formula | None,
) -> Tensor:
    """Run `functional.feed_forward` with the kernels.

    Args:
        x, weight1, bias1, weight2, bias2, activation, dropout_p, recompute: as in `functional.feed_forward`.
        formula: the op without dropout in plain PyTorch, a function of the first five, for second derivatives.
    """
    x, weight1, bias1, weight2, bias2 = to_autocast(x, weight1, bias1, weight2, bias2)  # type: ignore[assignment]
    seed = dropout_seed(x) if dropout_p > 0.0 else None
    shape = x.shape
    x = x.reshape(math.prod(shape[:-1]), shape[-1])
    compiling = torch.compiler.is_compiling()
    keeps = torch.is_grad_enabled() and (compiling or not recompute)
    inputs = (x, weight1, bias1, weight2, bias2, seed, activation, dropout_p, keeps, formula)
    if recompute and compiling:
        # The compiler would take the second h for the first one, and keep that; this forbids it.
        y, _ = checkpoint(_FeedForward.apply, *inputs, use_reentrant=False)
    else:
        y, _ = call(_FeedForward, *inputs)
    return y.view(*shape[:-1], y.shape[1])  # type: ignore[no-any-return]
