"""The feed-forward network of a layer.

Letters: D model width, F feed-forward width.
"""

from functools import partial

from torch import Tensor

from fastformer import reference
from fastformer.arguments import Activation, check_feed_forward, check_probability
from fastformer.functional.choice import eager_formula, runs_fused
from fastformer.fused.feed_forward import feed_forward as fused_feed_forward
from fastformer.host.devices import check_tensors


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
    """dropout(activation(x weight1^T + bias1)) weight2^T + bias2.

    Args:
        x: `[..., D]`.
        weight1: `[F, D]`, or `[2F, D]` = (gate, value) for the gated activations (Shazeer 2020).
        bias1: of weight1's first dimension, or None.
        weight2: `[Dout, F]`.
        bias2: `[Dout]`, or None.
        activation: "relu", "gelu" (exact), "gelu_tanh", "geglu", "swiglu", "reglu".
        dropout_p: dropout of the hidden activations; applied whenever it is not 0.
        recompute: keep x alone for backward, which costs one matrix product more there.

    Returns:
        `[..., Dout]`.

    Raises:
        ValueError: an argument does not fit.
    """
    names = ("x", "weight1", "weight2", "bias1", "bias2")
    check_tensors(names, x, (weight1, weight2), (bias1, bias2))
    check_feed_forward(x, weight1, bias1, weight2, bias2, activation)
    check_probability("dropout_p", dropout_p)
    if runs_fused("feed_forward", x):
        return fused_feed_forward(
            x,
            weight1,
            bias1,
            weight2,
            bias2,
            activation=activation,
            dropout_p=dropout_p,
            recompute=recompute,
            formula=eager_formula(partial(reference.feed_forward, activation=activation, dropout_p=0.0)),
        )
    return reference.feed_forward(
        x, weight1, bias1, weight2, bias2, activation=activation, dropout_p=dropout_p, recompute=recompute
    )
