"""Drop-in modules: torch.nn's classes with the fused ops inside, and the way there and back for existing models."""

from fastformer.nn.conversion import Conversion, Entry, convert, revert
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import FeedForward, LayerNorm, LinearCrossEntropy, RMSNorm
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.nn.transformer import Transformer

__all__ = [
    "Conversion",
    "Entry",
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
    "convert",
    "revert",
]
