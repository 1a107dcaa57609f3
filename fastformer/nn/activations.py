"""Activations of feed-forward networks: their names, their functions, and the names that the fused op accepts."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.feed_forward.op import GATED, Activation, activate


def gelu_tanh(x: Tensor) -> Tensor:
    """Apply the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return activate(x, "gelu_tanh")


def geglu(x: Tensor) -> Tensor:
    """Return gelu(gate) * value of `[..., 2F]` = (gate, value) (Shazeer 2020)."""
    return activate(x, "geglu")


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * value of `[..., 2F]` = (gate, value) (Shazeer 2020)."""
    return activate(x, "swiglu")


def reglu(x: Tensor) -> Tensor:
    """Return relu(gate) * value of `[..., 2F]` = (gate, value) (Shazeer 2020)."""
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
FUSED: dict[Any, Activation] = {function: name for name, function in FUNCTIONS.items() if name != "silu"}  # type: ignore[misc]


def is_gated(activation: object) -> bool:
    """Return whether an activation, a name or a function, is gated, so that it halves the width."""
    return activation in (*GATED, geglu, swiglu, reglu)


def as_function(activation: Any) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation's name; return a function unchanged.

    Raises:
        RuntimeError: no activation has this name.
    """
    if isinstance(activation, str) and activation not in FUNCTIONS:
        raise RuntimeError(f"activation should be {'/'.join(FUNCTIONS)}, not {activation}")
    return FUNCTIONS[activation] if isinstance(activation, str) else activation
