"""Transformer encoders that classify: every token (names, tags) or the whole sequence (topics, sentiments).

    hidden = encoder(embedding(ids))                 [T, D], each token sees its whole sequence
    tokens:    logits = output(dropout(hidden))      [T, C]
    sequences: logits = output(dropout(pooled))      [B, C], pooled [B, D] over the real tokens of each

Ids are packed, and `forward` returns the input of the output layer, not logits: the loss projects it in chunks (Devlin
et al. 2019, sections 4.1 and 5.3, for the two heads).

Letters: B sequences, T tokens (packed: of all sequences together), L longest, D model width, C classes.
"""

from dataclasses import KW_ONLY, MISSING
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fastformer.apps.models.common import (
    SingleStack,
    exported,
    layouts_of,
    packed_ids,
    real_of,
    summed_cross_entropy,
)
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.models.initialisation import initialise
from fastformer.apps.models.settings import ModelSettings
from fastformer.apps.models.sizes import LARGEST, MOST_LAYERS
from fastformer.apps.settings import inherited, setting
from fastformer.apps.text import LabelledBatch
from fastformer.nn.layers import TransformerEncoderLayer
from fastformer.nn.modules import make_norm
from fastformer.nn.stacks import TransformerEncoder
from fastformer.packing import Layout
from fastformer.packing.layout import RowMap

Pooling = Literal["mean", "first", "max"]


class EncoderConfig(ModelSettings):
    """The hyperparameters of a `TextEncoder`."""

    vocabulary: int = setting(MISSING, "size of the vocabulary", at_least=1, at_most=LARGEST, derived="the tokenizer")
    _: KW_ONLY
    d_model: int = inherited(ModelSettings, "d_model", default=256)
    heads: int = inherited(ModelSettings, "heads", default=4)
    layers: int = setting(4, "layers of the encoder", at_least=1, at_most=MOST_LAYERS)
    feed_forward: int = inherited(ModelSettings, "feed_forward", default=1024)
    dropout: float = inherited(
        ModelSettings, "dropout", help="dropout rate, also before the output layer; more specific rates override it"
    )
    token_types: int = setting(
        0, "token types, such as first and second sentence; 0: one type", at_least=0, at_most=LARGEST
    )
    embedding_norm: bool = setting(False, "a norm of the embeddings")
    pooling: str = setting(
        "mean", "SequenceClassifier: how the hidden states of the real tokens are combined", choices=get_args(Pooling)
    )
    pooler: bool = setting(False, "a layer with tanh after the pooling")

    @property
    def matrix_numbers(self) -> int:
        """The number of elements in all weight matrices: every parameter except biases and norms."""
        rows = self.vocabulary + self.token_types + (self.max_positions if self.positions == "learned" else 0)
        pooler = self.d_model if self.pooler else 0
        return (rows + pooler) * self.d_model + self.numbers_in_layers(self.layers)


class ClassifierConfig(EncoderConfig):
    """The hyperparameters of a classifier; stored with every checkpoint."""

    classes: int = setting(MISSING, "number of classes", at_least=2, at_most=LARGEST, derived="the labels")

    @property
    def matrix_numbers(self) -> int:
        """The number of elements in all weight matrices: every parameter except biases and norms."""
        return super().matrix_numbers + self.classes * self.d_model


class TextEncoder(SingleStack):
    """Embedding and encoder without a head; `pool` gives one vector for each sequence."""

    stack_name, causal = "encoder", False
    pools = True  # whether the class pools, and so has the layer of `config.pooler`

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.embedding = Embedding(
            c.vocabulary,
            c.d_model,
            c.embedded_positions,
            c.max_positions,
            c.scale_embeddings,
            c.dropout,
            c.token_types,
            make_norm(c.norm, c.d_model, c.norm_eps, c.bias, {}) if c.embedding_norm else None,
        )
        self.encoder = TransformerEncoder(c.made(TransformerEncoderLayer, causal=False), c.layers, c.final())
        if c.pooler and self.pools:
            self.pooler = nn.Linear(c.d_model, c.d_model)
        self._add_head()
        initialise(self, c, output_is_over_vocabulary=False)

    def _add_head(self) -> None:
        """Make the modules after the encoder."""

    def forward(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute the hidden states of the real tokens, packed in order: `[T, D]`.

        Args:
            ids: int64, packed `[T]` or padded at the end `[B, L]`.
            lengths: int64 `[B]`, on the CPU, so that the host never waits for the device. Zero is allowed, and so is
                B = 0. Or a `Layout`, which torch.compile needs.
            types: int64, of the shape of ids: the kind of each token, below `token_types`; None: 0.

        Raises:
            ValueError: ids has another shape, or a length exceeds the number of learned positions.
        """
        if exported(lengths):
            real = real_of("ids", ids, lengths)
            return self.encode_padded(ids, real, types)[real]
        return self.encode(ids, lengths, types)[0]

    def encode(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> tuple[Tensor, Layout]:
        """Encode ids, packed `[T]` or padded `[B, L]`; return hidden states `[T, D]` and the layout."""
        ids, layout = packed_ids("ids", ids, lengths)
        types = None if types is None else packed_ids("types", types, layout)[0]
        x = self.embedding(ids, layout.positions, layout.max_length, types)  # [T, D]
        return self.encoder.packed(x, layout), layout

    def encode_padded(self, ids: Tensor, real: Tensor, types: Tensor | None = None) -> Tensor:
        """Encode padded ids `[B, L]`, True in `real` `[B, L]`; return hidden states `[B, L, D]`, 0 at padding."""
        x = self.embedding.padded(ids, types)
        return self.encoder(x, src_key_padding_mask=~real)  # type: ignore[no-any-return]

    def pool(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute a vector of each sequence, `[B, D]`, by `config.pooling`; arguments as for `forward`."""
        if exported(lengths):
            counts = lengths.to(ids.device)
            padded = self.encode_padded(ids, real_of("ids", ids, lengths), types)
        else:
            hidden, layout = self.encode(ids, lengths, types)
            B, L, counts = layout.batch, layout.max_length, layout.offsets.diff()
            rows = layout.once("sequences from column 0", lambda: RowMap.of(layout.slots, B * L))
            padded = rows.spread(hidden).view(B, L, hidden.shape[1])
        x = self._pool(padded, counts[:, None])
        return self.pooler(x).tanh() if "pooler" in self._modules else x

    def _pool(self, padded: Tensor, lengths: Tensor) -> Tensor:
        """Pool hidden states `[B, L, D]`, 0 at padding, of sequences with lengths `[B, 1]` to `[B, D]`."""
        L = padded.shape[1]
        if self.config.pooling == "mean" or L == 0:
            wide = torch.promote_types(padded.dtype, torch.float32)  # fp16 could not hold the sum of a long sequence
            return (padded.sum(1, dtype=wide) / lengths.clamp(min=1)).to(padded.dtype)
        if self.config.pooling == "first":
            return padded[:, 0]
        after = torch.arange(L, device=padded.device) >= lengths  # [B, L]
        return padded.masked_fill(after[..., None], -torch.inf).amax(1).masked_fill(lengths == 0, 0.0)


class _Classifier(TextEncoder):
    """Encoder, dropout and output layer."""

    config: ClassifierConfig

    def _add_head(self) -> None:
        self.dropout = nn.Dropout(self.config.dropout)
        self.output = nn.Linear(self.config.d_model, self.config.classes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project what `forward` returned, `[..., D]`, to logits `[..., C]`."""
        return self.output(hidden)  # type: ignore[no-any-return]


class TokenClassifier(_Classifier):
    """A class for every token; `logits(model(ids, lengths))` are the scores of the classes."""

    pools = False

    def forward(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute the input of the output layer for real tokens: `[T, D]`; arguments as for `TextEncoder`."""
        return self.dropout(super().forward(ids, lengths, types))  # type: ignore[no-any-return]


class SequenceClassifier(_Classifier):
    """A class for every sequence; `logits(model(ids, lengths))` are the scores of the classes.

    `pooling` reduces the hidden states of a sequence to one vector: "mean" or "max" over real tokens, for each of the D
    features, or "first", the hidden state of the first token (Devlin et al. put a token for the whole sequence there).
    A sequence without tokens is pooled to 0, so that its logits are the output layer's bias.
    """

    def forward(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute the input of the output layer for sequences: `[B, D]`; arguments as for `TextEncoder`."""
        return self.dropout(self.pool(ids, lengths, types))  # type: ignore[no-any-return]


def token_classification_loss(model: TokenClassifier, batch: LabelledBatch, label_smoothing: float = 0.0) -> Tensor:
    """Return the summed cross entropy over tokens whose label is not -100, fp32, in nats; padding is excluded.

    `model` may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.

    Raises:
        ValueError: labels are not of the shape of the ids.
        IndexError: a label on the CPU is no class.
    """
    (layout,) = layouts_of(batch, "lengths")
    hidden = model(batch.ids, layout)
    return summed_cross_entropy(model.output, hidden, batch.labels, layout, label_smoothing)


def sequence_classification_loss(
    model: SequenceClassifier, batch: LabelledBatch, label_smoothing: float = 0.0
) -> Tensor:
    """Return the summed cross entropy over sequences whose label is not -100, fp32, in nats.

    `model` may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.

    Raises:
        ValueError: labels are not `[B]`.
        IndexError: a label on the CPU is no class.
    """
    (layout,) = layouts_of(batch, "lengths")
    pooled = model(batch.ids, layout)
    if batch.labels.dim() != 1:
        raise ValueError(f"labels must be [{len(pooled)}], one a sequence, not {list(batch.labels.shape)}")
    return summed_cross_entropy(model.output, pooled, batch.labels, layout, label_smoothing)
