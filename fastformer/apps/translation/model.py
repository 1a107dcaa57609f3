"""The encoder-decoder Transformer for translation (Vaswani et al. 2017), from ids to hidden states, without padding.

The model packs its input once; every layer works on real tokens only. It returns hidden states, not logits: the loss,
beside the model, projects them where it needs them.

Letters: B batch, T target and S source positions (packed: of all sentences together), D model width, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args, overload

import torch
from torch import Tensor, nn

from fastformer.apps.models.common import (
    check_settings,
    choice,
    layouts_of,
    maps_of_each,
    packed_ids,
    self_attention_maps,
    sequences_of,
    summed_cross_entropy,
    tie,
    watched,
)
from fastformer.apps.models.embeddings import Embedding, Positions
from fastformer.apps.models.initialisation import InitialisationSettings, initialise
from fastformer.apps.models.sizes import numbers_in_layers
from fastformer.apps.text import Batch
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import LayerNorm
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.packing import Layout

Embeddings = Literal["separate", "tied", "shared"]


@dataclass(frozen=True)
class TranslationConfig(InitialisationSettings):
    """Everything that decides the shape of a `TranslationModel`; stored with every checkpoint."""

    source_vocabulary: int = field(metadata={"help": "size of the source vocabulary (set from the tokenizer)"})
    target_vocabulary: int = field(metadata={"help": "size of the target vocabulary (set from the tokenizer)"})
    d_model: int = field(default=512, metadata={"help": "width of the model"})
    heads: int = field(default=8, metadata={"help": "attention heads; must divide d_model"})
    encoder_layers: int = field(default=6, metadata={"help": "layers of the encoder"})
    decoder_layers: int = field(default=6, metadata={"help": "layers of the decoder"})
    feed_forward: int = field(default=2048, metadata={"help": "width of the feed-forward layers"})
    dropout: float = field(default=0.1, metadata={"help": "dropout everywhere"})
    activation: str = field(default="relu", metadata=choice("activation", ("relu", "gelu")))
    norm_first: bool = field(default=True, metadata={"help": "pre-norm layers (else post-norm)"})
    final_norm: bool = field(default=True, metadata={"help": "a norm after the last layer of each stack"})
    norm_eps: float = field(default=1e-5, metadata={"help": "epsilon of the layer norms"})
    bias: bool = field(default=True, metadata={"help": "biases in linear layers and norms"})
    positions: str = field(default="sinusoidal", metadata=choice("position encoding", get_args(Positions)))
    max_positions: int = field(default=512, metadata={"help": "longest sequence", "only": {"positions": "learned"}})
    embeddings: str = field(
        default="tied",
        metadata=choice(
            "tied: target embedding is the output projection; shared: source embedding too",
            get_args(Embeddings),
        ),
    )
    scale_embeddings: bool = field(default=True, metadata={"help": "multiply embeddings by sqrt(d_model)"})
    output_bias: bool = field(default=False, metadata={"help": "a bias in the output projection"})
    pad_id: int = field(default=1, metadata={"help": "id of the padding token (set from the tokenizer)"})
    bos_id: int = field(default=2, metadata={"help": "id of the begin token (set from the tokenizer)"})
    eos_id: int = field(default=3, metadata={"help": "id of the end token (set from the tokenizer)"})

    def __post_init__(self) -> None:
        sizes = ("d_model", "heads", "encoder_layers", "decoder_layers", "feed_forward", "max_positions")
        check_settings(self, ("source_vocabulary", "target_vocabulary", *sizes), vocabulary="target_vocabulary")
        if self.embeddings == "shared" and self.source_vocabulary != self.target_vocabulary:
            raise ValueError(
                f"embeddings 'shared' needs one joint vocabulary, not {self.source_vocabulary} and "
                f"{self.target_vocabulary} entries"
            )

    @property
    def matrix_numbers(self) -> int:
        """How many numbers the weight matrices have: all parameters but biases and norms."""
        source = {
            "shared": 0,
            "tied": self.source_vocabulary,
            "separate": self.source_vocabulary + self.target_vocabulary,
        }
        positions = 2 * self.max_positions if self.positions == "learned" else 0
        rows = source[self.embeddings] + self.target_vocabulary + positions
        encoder, decoder = (
            numbers_in_layers(self, self.encoder_layers),
            numbers_in_layers(self, self.decoder_layers, True),
        )
        return rows * self.d_model + encoder + decoder

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence on either side: learned positions end somewhere, sinusoidal ones do not."""
        return self.max_positions if self.positions == "learned" else None


class TranslationModel(nn.Module):
    """Encoder, decoder and embeddings; `output` projects hidden states to logits."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        c = config

        def embedding(vocabulary: int) -> Embedding:
            positions: Positions = c.positions  # type: ignore[assignment]
            return Embedding(vocabulary, c.d_model, positions, c.max_positions, c.scale_embeddings, c.dropout)

        layer = (c.d_model, c.heads, c.feed_forward, c.dropout, c.activation, c.norm_eps, True, c.norm_first, c.bias)
        self.source_embedding = embedding(c.source_vocabulary)
        self.target_embedding = embedding(c.target_vocabulary)
        self.encoder = TransformerEncoder(TransformerEncoderLayer(*layer), c.encoder_layers, self._final_norm())
        self.decoder = TransformerDecoder(TransformerDecoderLayer(*layer), c.decoder_layers, self._final_norm())
        self.output = nn.Linear(c.d_model, c.target_vocabulary, bias=c.output_bias)
        initialise(self, c)
        tie(self)
        self.register_load_state_dict_post_hook(tie)  # type: ignore[no-untyped-call]

    def tied(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the modules that share a weight: which takes it, and whose it is."""
        owner = self.target_embedding.tokens
        takers: dict[str, list[nn.Module]] = {
            "separate": [],
            "tied": [self.output],
            "shared": [self.source_embedding.tokens, self.output],
        }
        return [(taker, owner) for taker in takers[self.config.embeddings]]

    def _final_norm(self) -> LayerNorm | None:
        c = self.config
        return LayerNorm(c.d_model, eps=c.norm_eps, bias=c.bias) if c.final_norm else None

    def encode(self, source: Tensor, source_lengths: Tensor | Layout) -> tuple[Tensor, Layout]:
        """Encode source ids, packed `[S]` or padded `[B, S]`: packed memory `[S, D]` and its layout."""
        ids, layout = packed_ids("source", source, source_lengths)
        x = self.source_embedding(ids, layout.positions, layout.max_length)
        return self.encoder.packed(x, layout), layout

    def forward(
        self, source: Tensor, source_lengths: Tensor | Layout, target_in: Tensor, target_lengths: Tensor | Layout
    ) -> Tensor:
        """Compute the hidden states of the real target positions, packed in order: `[T, D]`.

        Args:
            source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
            source_lengths: int64 `[B]`, on the CPU, so that nothing waits for the device; or their layout, which
                torch.compile needs.
            target_in: int64 ids that begin with bos, packed `[T]` or padded `[B, T]`.
            target_lengths: likewise.
        """
        memory, source_layout = self.encode(source, source_lengths)
        ids, layout = packed_ids("target_in", target_in, target_lengths)
        x = self.target_embedding(ids, layout.positions, layout.max_length)
        return self.decoder.packed(x, layout, memory, source_layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states `[..., D]` to logits `[..., V]`."""
        return self.output(hidden)  # type: ignore[no-any-return]

    @overload
    def attention_maps(self, source: Tensor, target_in: Tensor) -> dict[str, Tensor]: ...

    @overload
    def attention_maps(
        self, source: Tensor, target_in: Tensor, source_lengths: Tensor | Layout, target_lengths: Tensor | Layout
    ) -> list[dict[str, Tensor]]: ...

    @torch.no_grad()
    def attention_maps(
        self,
        source: Tensor,
        target_in: Tensor,
        source_lengths: Tensor | Layout | None = None,
        target_lengths: Tensor | Layout | None = None,
    ) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """Compute every attention weight for one sentence pair, or for each of several; call `.eval()` first.

        In training, dropout takes some of them away.

        Args:
            source: int64 ids with eos, `[S]`, one sentence; or several, as `forward` takes them.
            target_in: int64 ids that begin with bos, `[T]`, likewise.
            source_lengths, target_lengths: of several, as `forward` takes them.

        Returns:
            "encoder" `[layers, H, S, S]`, "decoder" `[layers, H, T, T]` and "cross" `[layers, H, T, S]`. With lengths,
            a list of such tensors for each of the B pairs, of its own S and T.

        Raises:
            ValueError: ids are of another shape, or the two sides are not equally many sentences.
        """
        decoder: list[list[Tensor]] = []
        cross: list[list[Tensor]] = []
        ids, keys = sequences_of("source", source, source_lengths)
        read, queries = sequences_of("target_in", target_in, target_lengths)
        if keys.batch != queries.batch:
            raise ValueError(f"source and target_in must be equally many, not {keys.batch} and {queries.batch}")
        x = self.source_embedding(ids, keys.positions, keys.max_length)
        x, encoder = self_attention_maps(self.encoder.layers, x, keys)
        memory = x if self.encoder.norm is None else self.encoder.norm(x)
        x = self.target_embedding(read, queries.positions, queries.max_length)
        for layer in self.decoder.layers:
            own = watched(layer.self_attn, decoder, queries, causal=True)
            x = layer.compose(x, own, watched(layer.multihead_attn, cross, queries, memory, keys))
        each = zip(encoder, maps_of_each(decoder), maps_of_each(cross), strict=True)
        maps = [dict(zip(("encoder", "decoder", "cross"), three, strict=True)) for three in each]
        return maps[0] if source_lengths is None and target_lengths is None else maps


def translation_loss(model: TranslationModel, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Sum of the cross entropy over the real target tokens of a batch, fp32, in nats; padding never takes part.

    `model` may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.
    """
    source, target = layouts_of(batch, "source_lengths", "target_lengths")
    hidden = model(batch.source, source, batch.target_in, target)
    return summed_cross_entropy(model.output, hidden, batch.target_out, target, label_smoothing)
