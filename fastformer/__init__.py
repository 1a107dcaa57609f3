"""fastformer: drop-in torch.nn Transformer modules without work on padding.

Names are imported on first use: `import fastformer` itself is instant and needs no GPU, no Triton and no optional
dependency.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Imported eagerly: a later import of the submodule `backend` would replace the function of that name.
from fastformer.backend import backend, get_backend, set_backend

__version__ = "0.1.0"

_MODULE_OF = {
    "convert": "nn.conversion",
    "explain": "functional",
    "revert": "nn.conversion",
    "sdpa": "functional.sdpa",
    "token_wise": "nn.modules",
    "warm_up": "functional.warm_up",
    "FeedForward": "nn.modules",
    "LayerNorm": "nn.modules",
    "LinearCrossEntropy": "nn.modules",
    "RMSNorm": "nn.modules",
    "MultiheadAttention": "nn.multihead_attention",
    "Transformer": "nn.transformer",
    "TransformerDecoder": "nn.stacks",
    "TransformerDecoderLayer": "nn.layers",
    "TransformerEncoder": "nn.stacks",
    "TransformerEncoderLayer": "nn.layers",
}
_SUBMODULES = ("apps", "functional", "integrations", "nn", "packing")

__all__ = [
    "FeedForward",
    "LayerNorm",
    "LinearCrossEntropy",
    "MultiheadAttention",
    "RMSNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "apps",
    "backend",
    "convert",
    "explain",
    "functional",
    "get_backend",
    "integrations",
    "nn",
    "packing",
    "revert",
    "sdpa",
    "set_backend",
    "token_wise",
    "warm_up",
]

if TYPE_CHECKING:
    from fastformer import apps, functional, integrations, nn, packing
    from fastformer.functional import explain
    from fastformer.functional.sdpa import sdpa
    from fastformer.functional.warm_up import warm_up
    from fastformer.nn.conversion import convert, revert
    from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
    from fastformer.nn.modules import FeedForward, LayerNorm, LinearCrossEntropy, RMSNorm, token_wise
    from fastformer.nn.multihead_attention import MultiheadAttention
    from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
    from fastformer.nn.transformer import Transformer


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
