"""Every module, stack and model, small, with torch's own of the same parameters where there is one, and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastformer
from fastformer.apps.classification.model import ClassifierConfig, SequenceClassifier, TokenClassifier
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.packing import Layout
from tests.support.closeness import random
from tests.support.masks import ahead, right

D, H, FF, V = 8, 2, 12, 17
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of one call


@dataclass(frozen=True)
class Subject:
    """How to make a module, and a call of it for a batch of B sequences, the longest of L tokens.

    Attributes:
        make: takes a library, fastformer or torch.nn, and the rate of dropout.
        inputs: takes B, L and a dtype.
        torchs: whether torch.nn has the class.
        method: what is called.
    """

    make: Callable[[Any, float], nn.Module]
    inputs: Callable[[int, int, torch.dtype], Call]
    torchs: bool = True
    method: str = "forward"

    def pair(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        """Build a module and torch's, or two of fastformer; norms and biases are random, so that swapped ones show."""
        module, other = (self.make(library, dropout).to(dtype) for library in (fastformer, nn if self.torchs else None))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        other.load_state_dict(module.state_dict())
        return module, other

    def run(self, module: Callable[..., Any], call: Call) -> Tensor:
        """Call a module, or a function made of it, and return its first output."""
        args, kwargs = call
        out = module(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def function(self, module: nn.Module) -> Callable[..., Any]:
        """Return what users call, and pass to torch.compile."""
        return module if self.method == "forward" else getattr(module, self.method)  # type: ignore[no-any-return]


def leaves(call: Call, module: nn.Module) -> list[Tensor]:
    """Return the inputs of a call that require gradients, and the parameters of the module."""
    inputs = [x for x in call[0] if isinstance(x, Tensor) and x.requires_grad]
    return [*dict.fromkeys(inputs), *module.parameters()]


def lengths(B: int, L: int) -> list[int]:
    """Return ragged lengths: the longest is L, none is 0."""
    return [max(1, L - 2 * b) for b in range(B)]


def padding(B: int, L: int) -> Tensor:
    """Return bool `[B, L]`, True = padding."""
    return right(lengths(B, L), L)


def _x(B: int, L: int, dtype: torch.dtype) -> Tensor:
    return random(B, L, D, dtype=dtype)


def _alone(B: int, L: int, dtype: torch.dtype) -> Call:
    return (_x(B, L, dtype),), {}


def _self(B: int, L: int, dtype: torch.dtype) -> Call:
    x = _x(B, L, dtype)
    return (x, x, x), {"key_padding_mask": padding(B, L), "need_weights": False}


def _cross(B: int, L: int, dtype: torch.dtype) -> Call:
    keys = _x(B, L + 3, dtype)
    return (_x(B, L, dtype), keys, keys), {"attn_mask": torch.ones(L, L + 3).triu(4).bool()}


def _encode(B: int, L: int, dtype: torch.dtype) -> Call:
    return (_x(B, L, dtype),), {"src_key_padding_mask": padding(B, L)}


def _encode_causal(B: int, L: int, dtype: torch.dtype) -> Call:
    return (_x(B, L, dtype),), {"mask": ahead(L), "is_causal": True, "src_key_padding_mask": padding(B, L)}


def _decode(B: int, L: int, dtype: torch.dtype) -> Call:
    masks = {"tgt_mask": ahead(L), "tgt_key_padding_mask": padding(B, L), "tgt_is_causal": True}
    return (_x(B, L, dtype), _x(B, L + 3, dtype)), {**masks, "memory_key_padding_mask": padding(B, L + 3)}


def _transform(B: int, L: int, dtype: torch.dtype) -> Call:
    (target, source), masks = _decode(B, L, dtype)
    return (source, target), {**masks, "src_key_padding_mask": masks["memory_key_padding_mask"].clone()}


def _packed(B: int, L: int, dtype: torch.dtype) -> Call:
    layout = Layout.from_lengths(lengths(B, L))
    return (random(layout.total, D, dtype=dtype), layout), {"causal": True}


def _packed_pair(B: int, L: int, dtype: torch.dtype) -> Call:
    (x, layout), _ = _packed(B, L, dtype)
    (memory, memory_layout), _ = _packed(B, L + 3, dtype)
    return (x, layout, memory, memory_layout), {}


def _classes(B: int, L: int, dtype: torch.dtype) -> Call:
    return (_x(B, L, dtype), torch.randint(V, (B, L))), {}


def _ids(B: int, L: int, dtype: torch.dtype) -> Call:
    layout = Layout.from_lengths(lengths(B, L))
    return (torch.randint(4, V, (layout.total,)), layout), {}


def _padded_ids(B: int, L: int, dtype: torch.dtype) -> Call:
    """Return ids with columns of padding alone where B is odd, and without padding where B is 4."""
    layout = Layout.from_lengths([L] * B if B == 4 else lengths(B, L))
    return (torch.randint(4, V, (B, L + 2 * (B % 2))), layout), {}


def _pairs(B: int, L: int, dtype: torch.dtype) -> Call:
    return (*_ids(B, L + 3, dtype)[0], *_ids(B, L, dtype)[0]), {}


def _layer(kind: str, norm_first: bool) -> Callable[[Any, float], nn.Module]:
    name = f"Transformer{kind}Layer"
    return lambda library, p: getattr(library, name)(D, H, FF, p, batch_first=True, norm_first=norm_first)


def _stack(kind: str, norm_first: bool = False) -> Callable[[Any, float], nn.Module]:
    def make(library: Any, p: float) -> nn.Module:
        settings = {"enable_nested_tensor": False} if kind == "Encoder" else {}
        layer = _layer(kind, norm_first)(library, p)
        return getattr(library, f"Transformer{kind}")(layer, 1, library.LayerNorm(D), **settings)  # type: ignore[no-any-return]

    return make


def _transformer(library: Any, p: float) -> nn.Module:
    return library.Transformer(D, H, 1, 1, FF, p, batch_first=True)  # type: ignore[no-any-return]


_SIZES: dict[str, Any] = {"d_model": D, "heads": H, "feed_forward": FF, "max_positions": 8}
_ONE = {**_SIZES, "vocabulary": V, "layers": 1}
_TWO = {**_SIZES, "source_vocabulary": V, "target_vocabulary": V, "encoder_layers": 1, "decoder_layers": 1}


def _classifier(kind: type[nn.Module], pooling: str = "mean") -> Callable[[Any, float], nn.Module]:
    return lambda _, p: kind(ClassifierConfig(classes=3, dropout=p, pooling=pooling, **_ONE))


DROP_INS = {
    "LayerNorm": Subject(lambda library, p: library.LayerNorm(D), _alone),
    "RMSNorm": Subject(lambda library, p: library.RMSNorm(D), _alone),
    "MultiheadAttention": Subject(lambda library, p: library.MultiheadAttention(D, H, p, batch_first=True), _self),
    "MultiheadAttention, cross": Subject(
        lambda library, p: library.MultiheadAttention(D, H, p, batch_first=True), _cross
    ),
    "TransformerEncoderLayer": Subject(_layer("Encoder", False), _encode),
    "TransformerEncoderLayer, pre-norm": Subject(_layer("Encoder", True), _encode),
    "TransformerDecoderLayer": Subject(_layer("Decoder", False), _decode),
    "TransformerDecoderLayer, pre-norm": Subject(_layer("Decoder", True), _decode),
    "TransformerEncoder": Subject(_stack("Encoder"), _encode_causal),
    "TransformerDecoder": Subject(_stack("Decoder", True), _decode),
    "Transformer": Subject(_transformer, _transform),
}
OWN = {
    "FeedForward": Subject(lambda _, p: fastformer.FeedForward(D, FF, p, "swiglu"), _alone, False),
    "LinearCrossEntropy": Subject(
        lambda _, p: fastformer.LinearCrossEntropy(D, V, label_smoothing=0.1), _classes, False
    ),
    "TransformerEncoder.packed": Subject(lambda _, p: _stack("Encoder")(fastformer, p), _packed, False, "packed"),
    "TransformerDecoder.packed": Subject(lambda _, p: _stack("Decoder")(fastformer, p), _packed_pair, False, "packed"),
    "LanguageModel": Subject(lambda _, p: LanguageModel(LanguageConfig(dropout=p, **_ONE)), _ids, False),
    "LanguageModel, padded": Subject(lambda _, p: LanguageModel(LanguageConfig(dropout=p, **_ONE)), _padded_ids, False),
    "TranslationModel": Subject(lambda _, p: TranslationModel(TranslationConfig(dropout=p, **_TWO)), _pairs, False),
    "TokenClassifier": Subject(_classifier(TokenClassifier), _ids, False),
    "SequenceClassifier": Subject(_classifier(SequenceClassifier), _ids, False),
    "SequenceClassifier, max": Subject(_classifier(SequenceClassifier, "max"), _ids, False),
}
CASES = {**DROP_INS, **OWN}
