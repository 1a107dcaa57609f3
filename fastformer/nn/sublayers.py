"""The steps between the sublayers of a layer: residual, dropout and norm, in one op where the parts allow it.

Letters: D model width.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastformer import functional
from fastformer.host.devices import autocasts
from fastformer.nn.hooks import plain
from fastformer.nn.modules import LayerNorm, RMSNorm, activation_name, run_feed_forward
from fastformer.nn.multihead_attention import MultiheadAttention

NORMS = (LayerNorm, nn.LayerNorm, RMSNorm, nn.RMSNorm)  # those that an op may take with the sum before them


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The second sublayer."""
    parts = layer.linear1, layer.dropout, layer.linear2
    return run_feed_forward(x, *parts, activation_name(layer.activation), layer.activation)


class Pending(NamedTuple):
    """What a layer has still to add up, residual + dropout(x): the next norm does that in one op with its own work."""

    x: Tensor
    residual: Tensor
    dropout: Any

    def add(self) -> Tensor:
        """Add it up."""
        return self.residual + _dropout(self.x, self.dropout)

    def norm(self, norm: Any, reader: Any = None) -> tuple[Tensor, Tensor]:
        """Return its norm, and itself added up.

        reader: what alone reads the norm; under autocast that is then written as its matrix products take it.
        """
        # An attention of somebody's own may return what broadcasts.
        same = self.x.shape == self.residual.shape
        if not (same and plain(self.dropout, nn.Dropout) and plain(norm, *NORMS)):
            total = self.add()
            return norm(total), total
        given = self.x, self.residual, norm.normalized_shape, norm.weight
        options: Any = {
            "eps": norm.eps,
            "dropout_p": self.dropout.p if self.dropout.training else 0.0,
            "dtype": _product_dtype(self.residual, reader),
        }
        if isinstance(norm, nn.RMSNorm):
            return functional.dropout_add_rms_norm(*given, **options)
        return functional.dropout_add_layer_norm(*given, norm.bias, **options)


def first_norm(x: Tensor | Pending, norm: Any, reader: Any) -> tuple[Tensor, Tensor]:
    """The norm at the beginning of a layer, and what it is of."""
    if isinstance(x, Pending):
        return x.norm(norm, reader)
    dtype = _product_dtype(x, reader)
    if dtype is None or not plain(norm, *NORMS):
        return norm(x), x
    given = x, norm.normalized_shape, norm.weight
    if isinstance(norm, nn.RMSNorm):
        return functional.rms_norm(*given, norm.eps, dtype=dtype), x
    return functional.layer_norm(*given, norm.bias, norm.eps, dtype=dtype), x


def _product_dtype(x: Tensor, reader: Any) -> torch.dtype | None:
    """The dtype in which autocast would have `reader` read x; None without autocast, or where nobody knows."""
    if (
        reader is None
        or not autocasts(x)
        or x.dtype == torch.float64
        or not plain(reader, nn.Linear, MultiheadAttention)
    ):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _dropout(x: Tensor, dropout: Any) -> Tensor:
    if not plain(dropout, nn.Dropout):
        return cast(Tensor, dropout(x))
    return functional.dropout(x, dropout.p if dropout.training else 0.0)
