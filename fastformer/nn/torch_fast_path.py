"""torch's fast path of an encoder layer: one op for all of it, in inference.

The op calls no overridden methods, adapters and hooks, so it runs only where it computes what the layer does.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastformer.nn.modules import activation_name

_PARTS = 8  # of an encoder layer


def fast_path_activation(layer: Any) -> int:
    """Return 1 for ReLU and 2 for GELU, as torch calls them; 0 where the layer is not what the op computes.

    layer: a `TransformerEncoderLayer`, not of a subclass.
    """
    known = {"relu": 1, "gelu": 2}.get(activation_name(layer.activation) or "", 0)
    own: Any = layer._modules
    if not known or any(own[name].training for name in ("dropout", "dropout1", "dropout2")):
        return 0
    if len(layer.plain_parts()) < _PARTS or not own["self_attn"].is_torchs_formula():
        return 0
    parts = [own[name]._parameters for name in ("linear1", "linear2", "norm1", "norm2")]
    return 0 if any(part.get(name) is None for part in parts for name in ("weight", "bias")) else known


def run_fast_path(layer: Any, src: Tensor) -> Tensor | None:
    """Run the op on src `[B, S, D]`; None where it does not compute what the layer does."""
    own: Any = layer._modules
    attention, norms = own["self_attn"], (own["norm1"], own["norm2"])
    known = layer.activation_relu_or_gelu
    if src.dim() != 3 or not known or not attention.batch_first or attention.num_heads % 2:
        return None
    if attention.training or norms[0].eps != norms[1].eps or attention.in_proj_bias is None:
        return None
    linears = attention.out_proj, own["linear1"], own["linear2"]
    attends = attention.in_proj_weight, attention.in_proj_bias, linears[0].weight, linears[0].bias
    others = [x for part in (*norms, *linears[1:]) for x in (part.weight, part.bias)]
    if any(type(x) is not nn.Parameter or x.dtype is not src.dtype for x in (*attends, *others)):
        return None
    sizes = attention.embed_dim, attention.num_heads
    return torch._transformer_encoder_layer_fwd(
        src, *sizes, *attends, known == 2, layer.norm_first, norms[0].eps, *others
    )
