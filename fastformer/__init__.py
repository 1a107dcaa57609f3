"""fastformer: drop-in torch.nn Transformer modules without work on padding.

Names are imported when they are first used: `import fastformer` itself is instant and needs no GPU, no Triton and
nothing of the extras.
"""

import importlib
from typing import TYPE_CHECKING, Any

# At once: loading the submodule of the same name later would put the module in the function's place.
from fastformer.backend import allow_nondeterminism, backend, get_backend, set_backend

__version__ = "0.1.0"

_HOME = {
    "convert": "fastformer.conversion",
    "explain": "fastformer.functional",
    "revert": "fastformer.conversion",
    "FeedForward": "fastformer.modules",
    "LayerNorm": "fastformer.modules",
    "LinearCrossEntropy": "fastformer.modules",
    "RMSNorm": "fastformer.modules",
    "MultiheadAttention": "fastformer.multihead_attention",
    "Transformer": "fastformer.stacks",
    "TransformerDecoder": "fastformer.stacks",
    "TransformerDecoderLayer": "fastformer.layers",
    "TransformerEncoder": "fastformer.stacks",
    "TransformerEncoderLayer": "fastformer.layers",
}
_SUBMODULES = (
    "functional",
    "generate",
    "integrations",
    "layers",
    "models",
    "modules",
    "packing",
    "plots",
    "text",
    "train",
)

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
    "allow_nondeterminism",
    "backend",
    "convert",
    "explain",
    "functional",
    "generate",
    "get_backend",
    "integrations",
    "layers",
    "models",
    "modules",
    "packing",
    "plots",
    "revert",
    "set_backend",
    "text",
    "train",
]

if TYPE_CHECKING:
    from fastformer import functional, generate, integrations, layers, models, modules, packing, plots, text, train
    from fastformer.conversion import convert, revert
    from fastformer.functional import explain
    from fastformer.layers import TransformerDecoderLayer, TransformerEncoderLayer
    from fastformer.modules import FeedForward, LayerNorm, LinearCrossEntropy, RMSNorm
    from fastformer.multihead_attention import MultiheadAttention
    from fastformer.stacks import Transformer, TransformerDecoder, TransformerEncoder


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"fastformer.{name}")
    raise AttributeError(f"module 'fastformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
