"""The activations of feed-forward networks: as names, as functions, and as the fused op calls those that it knows."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.feed_forward.op import GATED, Activation, activate


def gelu_tanh(x: Tensor) -> Tensor:
    """Apply GELU by its tanh formula (Hendrycks and Gimpel 2016)."""
    return activate(x, "gelu_tanh")


def geglu(x: Tensor) -> Tensor:
    """`[..., 2F]` = (gate, value) -> gelu(gate) * value (Shazeer 2020)."""
    return activate(x, "geglu")


def swiglu(x: Tensor) -> Tensor:
    """`[..., 2F]` = (gate, value) -> silu(gate) * value (Shazeer 2020)."""
    return activate(x, "swiglu")


def reglu(x: Tensor) -> Tensor:
    """`[..., 2F]` = (gate, value) -> relu(gate) * value (Shazeer 2020)."""
    return activate(x, "reglu")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "gelu_tanh": gelu_tanh,
    "geglu": geglu,
    "swiglu": swiglu,
    "reglu": reglu,
}
FUSED: dict[Any, Activation] = {
    F.relu: "relu",
    F.gelu: "gelu",
    gelu_tanh: "gelu_tanh",
    geglu: "geglu",
    swiglu: "swiglu",
    reglu: "reglu",
}


def is_gated(activation: object) -> bool:
    """Whether an activation, a name or a function, halves the width."""
    return activation in (*GATED, geglu, swiglu, reglu)


def as_function(activation: Any) -> Callable[[Tensor], Tensor]:
    """The function of a name; others are returned as they are.

    Raises:
        RuntimeError: there is none of this name.
    """
    if isinstance(activation, str) and activation not in FUNCTIONS:
        raise RuntimeError(f"activation should be {'/'.join(FUNCTIONS)}, not {activation}")
    return FUNCTIONS[activation] if isinstance(activation, str) else activation
