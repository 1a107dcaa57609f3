"""The feed-forward network of a layer: op, checks, reference, registration and autograd Function.

The fused op runs torch's matrix products, and one kernel between them in each direction:

    h = x weight1^T + bias1        a = dropout(activation(h))        y = a weight2^T + bias2

Saved for backward, beside the weights: x, and a if the activation is ReLU (its zeros replace h), else h, from which the
backward kernel computes a again; with `recompute` x alone. docs/kernels/feed-forward.md compares the bytes.

Letters: D model width, F feed-forward width, M rows.
"""

import math
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastformer.functional.choice import runs_fused
from fastformer.functional.dropout import drop
from fastformer.host.autograd_function import (
    Formula,
    call,
    define,
    dropout_seed,
    eager_formula,
    needs_double_backward,
    plain_gradients,
)
from fastformer.host.devices import check_probability, check_tensors, to_autocast
from fastformer.settings import check_value

Activation = Literal["relu", "gelu", "gelu_tanh", "geglu", "swiglu", "reglu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
GATED = ("geglu", "swiglu", "reglu")


def feed_forward(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: Activation = "relu",
    dropout_p: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """Compute dropout(activation(x weight1^T + bias1)) weight2^T + bias2.

    Args:
        x: `[..., D]`.
        weight1: `[F, D]`, or `[2F, D]` = (gate, value) for the gated activations (Shazeer 2020).
        bias1: of weight1's first dimension, or None.
        weight2: `[Dout, F]`.
        bias2: `[Dout]`, or None.
        activation: "relu", "gelu" (exact), "gelu_tanh", "geglu", "swiglu", "reglu".
        dropout_p: dropout of the hidden activations; applied whenever it is not 0.
        recompute: save x alone for backward, which then computes one more matrix product.

    Returns:
        `[..., Dout]`, of x's dtype, or of autocast's dtype under autocast.

    Raises:
        ValueError: an argument does not fit.
    """
    names = ("x", "weight1", "weight2", "bias1", "bias2")
    check_tensors(names, x, (weight1, weight2), (bias1, bias2))
    tensors = (x, weight1, bias1, weight2, bias2)
    _check(*tensors, activation)
    check_probability("dropout_p", dropout_p)
    if runs_fused("feed_forward", x):
        formula = eager_formula(partial(reference, activation=activation, dropout_p=0.0))
        return _fused(tensors, activation, dropout_p, recompute, formula)
    plain = partial(reference, activation=activation, dropout_p=dropout_p)
    if recompute and torch.is_grad_enabled():
        out: Tensor = checkpoint(plain, *tensors, use_reentrant=False)
        return out
    return plain(*tensors)


def _check(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        check_value("activation", activation, str, choices=ACTIVATIONS)
    if weight1.dim() != 2 or x.dim() == 0 or weight1.shape[1] != x.shape[-1]:
        raise ValueError(f"weight1 must be of shape [F, D] for x of shape {list(x.shape)}, not {list(weight1.shape)}")
    gated = activation in GATED
    width = weight1.shape[0] // 2 if gated else weight1.shape[0]
    if weight2.dim() != 2 or weight2.shape[1] != width or (gated and weight1.shape[0] % 2):
        raise ValueError(
            f"weight2 must be of shape [out, {width}] for activation {activation!r} "
            f"and weight1 of shape {list(weight1.shape)}, not {list(weight2.shape)}"
        )
    for name, bias, weight in (("bias1", bias1, weight1), ("bias2", bias2, weight2)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{name} must be of shape [{weight.shape[0]}], not {list(bias.shape)}")


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation; the gated forms take `[..., 2F]` = (gate, value) to `[..., F]` (Shazeer 2020).

    Numbers are torch's: gelu(inf) is NaN where oneDNN runs its AVX-512 code, and inf elsewhere, as in the kernels.
    """
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


def reference(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: Activation,
    dropout_p: float,
) -> Tensor:
    """Compute `feed_forward` in plain PyTorch."""
    # On rows: F.linear of more dimensions returns a view, whose gradient autograd copies if the view changes in place.
    batch = x.shape[:-1] if x.dim() > 2 and type(x) is Tensor else None
    hidden = F.linear(x if batch is None else x.flatten(0, -2), weight1, bias1)
    # ReLU in place, because nothing else needs its argument: saves one pass over the widest tensor of a layer.
    hidden = F.relu_(hidden) if activation == "relu" else activate(hidden, activation)
    out = F.linear(drop(hidden, dropout_p) if dropout_p else hidden, weight2, bias2)
    return out if batch is None else out.view(*batch, weight2.shape[0])


_activate = define(
    "feed_forward_activate(Tensor h, Tensor? seed, str activation, float dropout_p) -> Tensor",
    "feed_forward.kernels.activate",
    lambda h, activation: h.new_empty(h.shape[0], h.shape[1] // 2 if activation in GATED else h.shape[1]),
)
_hidden_again = define(
    "feed_forward_hidden_again(Tensor x, Tensor weight1, Tensor? bias1, Tensor dy) -> Tensor",
    "feed_forward.kernels.hidden_again",
    lambda x, weight1: x.new_empty(x.shape[0], weight1.shape[0]),
)
_activate_backward = define(
    "feed_forward_activate_backward(Tensor(a!) da, Tensor h, Tensor? seed, str activation, float dropout_p, "
    "bool wants_a, bool wants_bias) -> (Tensor, Tensor)",
    "feed_forward.kernels.activate_backward",
    lambda h, wants_bias: (h.new_empty(h.shape), h.new_empty(h.shape[1] if wants_bias else 0)),
)
_relu_backward = define(
    "feed_forward_relu_backward(Tensor(a!) da, Tensor a, float dropout_p, bool wants_bias) -> Tensor",
    "feed_forward.kernels.relu_backward",
    lambda a, wants_bias: a.new_empty(a.shape[1] if wants_bias else 0),
)


def activate_kernel(h: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to h `[M, F]`, or `[M, 2F]` of gated ones, without gradients; nothing is checked."""
    return _activate(h, None, activation, 0.0)  # type: ignore[no-any-return]


class _FeedForward(torch.autograd.Function):
    """x `[M, D]`, … -> (y `[M, Dout]`, the hidden tensor saved for backward or None)."""

    @staticmethod
    def forward(
        x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        seed, activation, dropout_p, saves_hidden, _ = rest
        h = F.linear(x, weight1, bias1)  # [M, F] or [M, 2F]
        a = _activate(h, seed, activation, dropout_p)  # [M, F]
        saved_hidden = (a if activation == "relu" else h) if saves_hidden else None
        del h  # frees its memory for the second product, unless it is saved
        return F.linear(a, weight2, bias2), saved_hidden

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        *tensors, ctx.activation, ctx.dropout_p, _, ctx.formula = inputs
        saved_hidden = output[1]
        ctx.save_for_backward(*tensors, saved_hidden)
        if saved_hidden is not None:
            ctx.mark_non_differentiable(saved_hidden)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        rest = (None,) * 5
        if dy is None:
            return *rest, *rest
        *inputs, seed, saved_hidden = ctx.saved_tensors
        if needs_double_backward("feed_forward", ctx.formula, seed):
            return *plain_gradients(ctx.formula, inputs, ctx.needs_input_grad[:5], (dy,)), *rest
        x, weight1, bias1, weight2, _ = inputs
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        activation, p = ctx.activation, ctx.dropout_p
        h: Any = None if activation == "relu" else saved_hidden
        a: Any = saved_hidden if activation == "relu" else None
        if saved_hidden is None:
            h = _hidden_again(x, weight1, bias1, dy)
        dx, dweight1, dbias1 = None, None, None
        if needs_x or needs_weight1 or needs_bias1:
            da = torch.mm(dy, weight2)  # [M, F], whose memory then holds another tensor of that size
            if h is None:
                dbias1 = _relu_backward(da, a, p, needs_bias1)
                dh = da
            else:
                dh, dbias1 = _activate_backward(da, h, seed, activation, p, needs_weight2, needs_bias1)
                a = da
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


def _fused(
    tensors: tuple[Tensor | None, ...], activation: str, dropout_p: float, recompute: bool, formula: Formula | None
) -> Tensor:
    """Run the op with its kernels; tensors are its first five arguments."""
    x, *parameters = to_autocast(*tensors)
    assert x is not None
    seed = dropout_seed(x) if dropout_p > 0.0 else None
    shape = x.shape
    x = x.reshape(math.prod(shape[:-1]), shape[-1])
    saves_hidden = torch.is_grad_enabled() and not recompute
    y, _ = call(_FeedForward, x, *parameters, seed, activation, dropout_p, saves_hidden, formula)
    return y.view(*shape[:-1], y.shape[1])  # type: ignore[no-any-return]
