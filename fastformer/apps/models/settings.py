"""The settings that all models have, and the embeddings, layers and initial values that follow from them.

Letters: D model width, F feed-forward width.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

from torch import Tensor, nn

from fastformer.apps.models.embeddings import Embedding, Positions
from fastformer.apps.settings import LARGEST, SET, Settings, reject_unused_options, setting
from fastformer.functional.attention.rules import SOFTCAPS
from fastformer.nn.activations import FUNCTIONS, is_gated
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import make_norm
from fastformer.nn.options import NORMS
from fastformer.nn.position_bias import ALiBi, RelativeBias
from fastformer.nn.rotary import Llama3Scaling, Rotary
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder

_INITIALISATIONS = ("xavier_uniform", "xavier_normal", "normal", "uniform")
_Stack = TypeVar("_Stack", TransformerEncoder, TransformerDecoder)
_LAYERS: dict[Any, Any] = {TransformerEncoder: TransformerEncoderLayer, TransformerDecoder: TransformerDecoderLayer}
_IN_ATTENTION = ("rotary", "alibi", "relative")  # positions that attention applies, not the embeddings
_LAYER_OPTIONS = ("norm", "kv_heads", "head_size", "qkv_bias", "qk_norm", "softcap", "sinks")
_ROTARY, _RELATIVE = {"positions": "rotary"}, {"positions": "relative"}
_RANGES = {"normal": 0.02, "uniform": 0.1}  # defaults of the distributions with a range


def fitting_shape(settings: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return `d_model` and `heads` for settings that may lack one or both, so that each fits the other.

    At most 8 heads are returned, of at least 32 numbers if possible; none with head_size, or if none fit.

    Args:
        settings: of a model, not checked yet; heads are returned only if it has none.
        width: `d_model` unless it is given, or must fit given heads.
    """
    heads, kv_heads = settings.get("heads"), settings.get("kv_heads") or 1
    if "d_model" in settings:
        width = settings["d_model"]
    elif isinstance(heads, int) and heads > 0 and "head_size" not in settings:
        width = heads * max(32, width // heads // 8 * 8)
    if heads is not None or "head_size" in settings or not (isinstance(width, int) and isinstance(kv_heads, int)):
        return {"d_model": width}
    fitting = [h for h in (8, 4, 2, 1) if width % h == 0 and h % kv_heads == 0]
    wide = [h for h in fitting if width // h >= 32] or fitting[-1:]
    return {"d_model": width, **({"heads": wide[0]} if wide else {})}


class ModelSettings(Settings, kw_only=True):
    """Base class of the models' settings, which are stored with every checkpoint."""

    d_model: int = setting(512, "width of the model", at_least=1, at_most=LARGEST)
    heads: int = setting(8, "attention heads; must divide d_model", at_least=1, at_most=LARGEST)
    feed_forward: int = setting(2048, "width of the feed-forward layers", at_least=1, at_most=LARGEST)
    dropout: float = setting(0.1, "dropout rate; more specific rates override it", at_least=0, below=1)
    attention_dropout: float | None = setting(
        None, "dropout of the attention weights; unset: dropout", at_least=0, below=1
    )
    activation_dropout: float | None = setting(
        None, "dropout of the feed-forward layers' activations; unset: dropout", at_least=0, below=1
    )
    activation: str = setting("relu", "activation", choices=tuple(FUNCTIONS))
    norm: str = setting("layer", "layer norms, or rms: RMS norms", choices=NORMS)
    norm_first: bool = setting(True, "pre-norm layers (else post-norm)")
    final_norm: bool = setting(True, "a norm after the last layer")
    norm_eps: float = setting(1e-5, "epsilon of the norms", above=0)
    bias: bool = setting(True, "biases in linear layers and norms")
    qkv_bias: bool | None = setting(None, "biases of queries, keys and values; unset: as bias")
    kv_heads: int | None = setting(
        None,
        "heads of keys and values, for grouped queries; must divide heads; unset: as many",
        at_least=1,
        at_most="heads",
    )
    head_size: int | None = setting(None, "size of a head; unset: d_model / heads", at_least=1, at_most=LARGEST)
    qk_norm: bool = setting(False, "RMS norms of each head of queries and keys")
    softcap: float | None = setting(
        None, "c: attention scores x become c tanh(x / c)", at_least=SOFTCAPS[0], at_most=SOFTCAPS[1]
    )
    window: int | None = setting(
        None, "tokens on either side that self-attention sees; unset: all", at_least=0, at_most=LARGEST
    )
    sinks: bool = setting(False, "a trained logit for each self-attention head that takes weight and has no value")
    positions: str = setting("sinusoidal", "position encoding", choices=(*get_args(Positions), *_IN_ATTENTION))
    max_positions: int = setting(512, "longest sequence", at_least=1, at_most=LARGEST, only={"positions": "learned"})
    rotary_theta: float = setting(10_000.0, "base of the rotary frequencies", above=0, only=_ROTARY)
    rotary_share: float = setting(1.0, "share of each head that is rotated", above=0, at_most=1, only=_ROTARY)
    rotary_scaling: float | None = setting(None, "factor by which positions are divided", above=0, only=_ROTARY)
    rotary_original: int | None = setting(
        None,
        "context before rotary_scaling; if set, only low frequencies are scaled, as in Llama 3",
        at_least=1,
        at_most=LARGEST,
        only={"rotary_scaling": SET},
    )
    relative_buckets: int = setting(32, "buckets of distances", at_least=4, at_most=LARGEST, only=_RELATIVE)
    relative_distance: int = setting(
        128, "distances from this one on share a bucket", at_least=1, at_most=LARGEST, only=_RELATIVE
    )
    scale_embeddings: bool = setting(True, "multiply embeddings by sqrt(d_model)")
    initialisation: str = setting("xavier_uniform", "values of new weight matrices", choices=_INITIALISATIONS)
    initialisation_range: float | None = setting(
        None,
        "uniform: from -range to range, unset: 0.1; normal: deviation, unset: 0.02",
        above=0,
        only={"initialisation": tuple(_RANGES)},
    )
    embedding_initialisation: str | None = setting(
        None,
        "values of new embeddings, and of an output projection over the vocabulary that is not tied; unset: "
        "embeddings with deviation 1/sqrt(d_model), the projection as the other matrices",
        choices=_INITIALISATIONS,
    )
    embedding_range: float | None = setting(
        None,
        "initialisation_range of the embeddings; normal, unset: 1/sqrt(d_model)",
        above=0,
        only={"embedding_initialisation": tuple(_RANGES)},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size is None and self.d_model % self.heads:
            raise ValueError(f"heads ({self.heads}) must divide d_model ({self.d_model})")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.positions == "rotary":
            self.rotary.rotated_size(self.head_width)
        if self.positions == "relative" and (
            self.relative_buckets % 2 or self.relative_distance <= self.relative_buckets // 2
        ):
            raise ValueError(
                f"relative_buckets must be even, and half of them below relative_distance, not {self.relative_buckets} "
                f"and {self.relative_distance}"
            )
        ranges = {name: getattr(self, name) for name in ("initialisation_range", "embedding_range")}
        reject_unused_options({"": {name: width for name, width in ranges.items() if width is not None}}, {"": self})

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence, with learned positions; None: no limit."""
        return self.max_positions if self.positions == "learned" else None

    @property
    def rotary(self) -> Rotary:
        """The rotation of queries and keys if positions are "rotary"."""
        factor, original = self.rotary_scaling, self.rotary_original
        llama = factor is not None and original is not None
        scaling = Llama3Scaling(factor, original=original) if llama else factor  # type: ignore[arg-type]
        return Rotary(self.rotary_theta, self.rotary_share, scaling)

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.d_model // self.heads if self.head_size is None else self.head_size

    def new_norm(self) -> nn.Module:
        """Return a new norm of D numbers."""
        return make_norm(self.norm, self.d_model, self.norm_eps, self.bias, {})

    def new_embedding(self, vocabulary: int, dropout: float | None = None, **options: Any) -> Embedding:
        """Return a new embedding; dropout: unset, that of the settings. options: of `Embedding`."""
        positions: Any = "none" if self.positions in _IN_ATTENTION else self.positions
        rate = self.dropout if dropout is None else dropout
        sizes = vocabulary, self.d_model, positions, self.max_positions
        return Embedding(*sizes, self.scale_embeddings, rate, **options)

    def new_stack(self, kind: type[_Stack], layers: int, causal: bool) -> _Stack:
        """Return a new stack of layers; causal: whether self-attention is causal."""
        # Only what differs from torch.nn's defaults: a layer without options draws other random numbers.
        defaults = {item.name: item.default for item in fields(ModelSettings)}
        options = {name: value for name in _LAYER_OPTIONS if (value := getattr(self, name)) != defaults[name]}
        if self.window is not None:
            options["window"] = (self.window, self.window)
        if self.positions == "rotary":
            options["rotary"] = self.rotary
        elif self.positions == "alibi":
            options["position_bias"] = ALiBi(self.heads)
        elif self.positions == "relative":
            buckets = self.relative_buckets, self.relative_distance
            options["position_bias"] = RelativeBias(self.heads, *buckets, bidirectional=not causal)
        sizes = self.d_model, self.heads, self.feed_forward, self.dropout, self.activation, self.norm_eps
        layer = _LAYERS[kind](*sizes, True, self.norm_first, self.bias, **options)
        if self.attention_dropout is not None:  # torch.nn's constructor takes one rate for all
            for attention in layer.attentions:
                attention.dropout = self.attention_dropout
        if self.activation_dropout is not None:
            layer.dropout.p = self.activation_dropout
        return kind(layer, layers, self.new_norm() if self.final_norm else None)

    def numbers_in_layers(self, layers: int, cross_attention: bool = False) -> int:
        """Return the number of elements in the weight matrices of a stack."""
        D, F, kv_heads = self.d_model, self.feed_forward, self.kv_heads or self.heads
        attention = 2 * D * self.head_width * (self.heads + kv_heads)
        bias = self.heads * self.relative_buckets if self.positions == "relative" else 0
        widths = 3 if is_gated(self.activation) else 2
        return int(layers * (attention * (2 if cross_attention else 1) + bias + widths * D * F))


def initialise(model: nn.Module, settings: ModelSettings, output_is_over_vocabulary: bool = True) -> None:
    """Draw all weight matrices of a model, in the order of its parameters; the bias of its output becomes 0.

    By default, embeddings are drawn from N(0, 1/D), so that tied logits start near 1, and every other matrix as set by
    `initialisation`. `embedding_initialisation` changes the distribution of embeddings, learned positions included, and
    of an output projection over the vocabulary, as the classical recipes do. The model's output is not tied yet.
    """
    matrices = _distribution(settings.initialisation, settings.initialisation_range, _RANGES["normal"])
    embeddings = _distribution(
        settings.embedding_initialisation or "normal", settings.embedding_range, settings.d_model**-0.5
    )
    of_embeddings: tuple[str, ...] = ("tokens.weight", "positions.weight", "types.weight")
    if output_is_over_vocabulary and settings.embedding_initialisation is not None:
        of_embeddings += ("output.weight",)
    for name, parameter in model.named_parameters():
        if name.endswith(of_embeddings):
            embeddings(parameter)
        elif parameter.dim() > 1:
            matrices(parameter)
        elif name == "output.bias":
            nn.init.zeros_(parameter)


def _distribution(how: str, width: float | None, deviation: float) -> Callable[[Tensor], Tensor]:
    """Return the function that fills a matrix; `deviation` is that of "normal" without a range."""
    if how == "normal":
        return lambda w: nn.init.normal_(w, std=deviation if width is None else width)
    if how == "uniform":
        bound = _RANGES["uniform"] if width is None else width
        return lambda w: nn.init.uniform_(w, -bound, bound)
    return nn.init.xavier_uniform_ if how == "xavier_uniform" else nn.init.xavier_normal_
