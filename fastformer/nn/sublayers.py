"""Building blocks of layers: attention callables, and residual, dropout and norm in one op where modules allow it.

Letters: D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastformer import functional
from fastformer.host.devices import autocasts
from fastformer.nn.modules import LayerNorm, RMSNorm
from fastformer.nn.packed_input import Masks

Attention = Callable[[Tensor], Tensor]  # normalised input -> attention output, of the same shape

NORMS = (LayerNorm, nn.LayerNorm, RMSNorm, nn.RMSNorm)  # an op may compute these together with the sum before them


class DeferredResidual(NamedTuple):
    """The sum residual + dropout(x) before it is computed: the next norm adds it in the same op.

    Attributes:
        plain: whether an op may apply the dropout.
    """

    x: Tensor
    residual: Tensor
    dropout: Any
    plain: bool

    def add(self) -> Tensor:
        """Return the sum."""
        if not self.plain:
            return self.residual + cast(Tensor, self.dropout(self.x))
        return self.residual + functional.dropout(self.x, self.dropout.p if self.dropout.training else 0.0)

    def norm(self, norm: Any, plain: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, in dtype if given, and the sum; plain: whether an op may compute the norm."""
        # A replaced attention may return a tensor that broadcasts.
        if not (plain and self.plain and self.x.shape == self.residual.shape):
            total = self.add()
            return norm(total), total
        operands = self.x, self.residual, norm.normalized_shape, norm.weight
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        if isinstance(norm, nn.RMSNorm):
            return functional.dropout_add_rms_norm(*operands, eps=norm.eps, dropout_p=dropout_p, dtype=dtype)
        return functional.dropout_add_layer_norm(*operands, norm.bias, eps=norm.eps, dropout_p=dropout_p, dtype=dtype)


def norm_of(
    x: Tensor | DeferredResidual, norm: Any, plain: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x, and x as a tensor; arguments as of `DeferredResidual.norm`."""
    if isinstance(x, DeferredResidual):
        return x.norm(norm, plain, dtype)
    if dtype is None or not plain:
        return norm(x), x
    operands = x, norm.normalized_shape, norm.weight
    if isinstance(norm, nn.RMSNorm):
        return functional.rms_norm(*operands, norm.eps, dtype=dtype), x
    return functional.layer_norm(*operands, norm.bias, norm.eps, dtype=dtype), x


def product_dtype(x: Tensor | DeferredResidual) -> torch.dtype | None:
    """Return the dtype in which autocast has matrix products read x; None without autocast."""
    x = x.residual if isinstance(x, DeferredResidual) else x
    if not autocasts(x) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def padded_call(attention: Any, memory: Tensor | None, masks: Masks, weights: list[Tensor] | None = None) -> Attention:
    """Return a callable for attention in a padded batch, to itself or to memory, called as torch's layers call it."""

    def attend(x: Tensor) -> Tensor:
        kv = x if memory is None else memory
        rules = {"attn_mask": masks.mask, "key_padding_mask": masks.padding, "is_causal": masks.is_causal}
        if weights is None:
            return attention(x, kv, kv, need_weights=False, **rules)[0]  # type: ignore[no-any-return]
        out, of_heads = attention(x, kv, kv, need_weights=True, average_attn_weights=False, **rules)
        weights.append(of_heads)
        return out  # type: ignore[no-any-return]

    return attend
