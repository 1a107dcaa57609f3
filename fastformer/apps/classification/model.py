"""Transformer encoders that classify: every token (names, tags) or the whole sequence (topics, sentiments).

    hidden = encoder(embedding(ids))                 [T, D], each token sees its whole sequence
    tokens:    logits = output(dropout(hidden))      [T, C]
    sequences: logits = output(dropout(pooled))      [B, C], pooled [B, D] over the real tokens of each

Ids are packed, and `forward` returns the input of the output layer, not logits: the loss projects it in chunks (Devlin
et al. 2019, sections 4.1 and 5.3, for the two heads).

Letters: B sequences, T tokens (packed: of all sequences together), L longest, D model width, C classes.
"""

from dataclasses import KW_ONLY, MISSING
from typing import ClassVar

import torch
from torch import Tensor, nn

from fastformer.apps.models.common import SingleStack, exported_mask, output_cross_entropy
from fastformer.apps.models.settings import ModelSettings, initialise
from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.settings import LARGEST, inherited, setting
from fastformer.apps.text import LabelledBatch
from fastformer.nn.stacks import TransformerEncoder
from fastformer.packing import Layout
from fastformer.packing.layout import RowMap


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
        "mean",
        "SequenceClassifier: how the hidden states of the real tokens are combined",
        choices=("mean", "first", "max"),
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
    pools: ClassVar[bool] = True  # and so has the layer of `config.pooler`
    classifies: ClassVar[bool] = False  # and so has dropout and an output layer

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.embedding = c.new_embedding(
            c.vocabulary, types=c.token_types, norm=c.new_norm() if c.embedding_norm else None
        )
        self.encoder = c.new_stack(TransformerEncoder, c.layers, causal=False)
        self.pooler = nn.Linear(c.d_model, c.d_model) if c.pooler and self.pools else None
        if self.classifies:
            assert isinstance(c, ClassifierConfig)
            self.dropout = nn.Dropout(c.dropout)
            self.output = nn.Linear(c.d_model, c.classes)
        initialise(self, c, output_is_over_vocabulary=False)

    def pool(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute a vector of each sequence, `[B, D]`, by `config.pooling`; arguments as for `forward`."""
        real = exported_mask("ids", ids, lengths)
        if real is not None:
            padded, counts = self.encode_padded(ids, real, types), real.sum(1)
        else:
            hidden, layout = self.encode(ids, lengths, types)
            B, L, counts = layout.batch, layout.max_length, layout.offsets.diff()
            padded = RowMap.of(layout.slots, B * L).spread(hidden).view(B, L, hidden.shape[1])
        x = self._pool(padded, counts[:, None])
        return x if self.pooler is None else self.pooler(x).tanh()

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


class TokenClassifier(TextEncoder):
    """A class for every token; `logits(model(ids, lengths))` are the scores of the classes."""

    config: ClassifierConfig
    pools, classifies = False, True

    def forward(self, ids: Tensor, lengths: Tensor | Layout, types: Tensor | None = None) -> Tensor:
        """Compute the input of the output layer for real tokens: `[T, D]`; arguments as for `TextEncoder`."""
        return self.dropout(super().forward(ids, lengths, types))  # type: ignore[no-any-return]


class SequenceClassifier(TextEncoder):
    """A class for every sequence; `logits(model(ids, lengths))` are the scores of the classes.

    `pooling` reduces the hidden states of a sequence to one vector: "mean" or "max" over real tokens, for each of the D
    features, or "first", the hidden state of the first token (Devlin et al. put a token for the whole sequence there).
    A sequence without tokens is pooled to 0, so that its logits are the output layer's bias.
    """

    config: ClassifierConfig
    classifies = True

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
    hidden = model(batch.ids, batch.lengths)
    return output_cross_entropy(model.output, hidden, batch.labels, batch.lengths, label_smoothing)


def sequence_classification_loss(
    model: SequenceClassifier, batch: LabelledBatch, label_smoothing: float = 0.0
) -> Tensor:
    """Return `token_classification_loss` of sequences, whose labels are `[B]`."""
    if batch.labels.dim() != 1:
        raise ValueError(f"labels must be [{len(batch)}], one a sequence, not {list(batch.labels.shape)}")
    return token_classification_loss(model, batch, label_smoothing)  # type: ignore[arg-type]
