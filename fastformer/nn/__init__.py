"""Drop-in modules: torch.nn's classes on fastformer's fused ops, and the conversion of models in both directions."""

from fastformer.nn.cache import KVCache, StaticKVCache
from fastformer.nn.conversion import Conversion, Entry, convert, revert
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import FeedForward, LayerNorm, LinearCrossEntropy, RMSNorm, token_wise
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.packed_weights import pack_weights
from fastformer.nn.position_bias import ALiBi, RelativeBias
from fastformer.nn.rotary import Llama3Scaling, Rotary
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.nn.transformer import Transformer

__all__ = [
    "ALiBi",
    "Conversion",
    "Entry",
    "FeedForward",
    "KVCache",
    "LayerNorm",
    "LinearCrossEntropy",
    "Llama3Scaling",
    "MultiheadAttention",
    "RMSNorm",
    "RelativeBias",
    "Rotary",
    "StaticKVCache",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "convert",
    "pack_weights",
    "revert",
    "token_wise",
]
