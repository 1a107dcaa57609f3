"""The decoder-only Transformer for language modelling (Liu et al. 2018, section 4.2.3), from ids to hidden states.

Documents, or pieces of them, lie one after another in one run of tokens. Attention is causal and stays within each;
positions count from its first token. So no token knows what else is in its batch, and there is no padding. As in the
translation model, hidden states are returned, not logits: the loss projects them where it needs them.

Letters: B documents, T positions (packed: of all documents together), D model width, V vocabulary.
"""

from dataclasses import KW_ONLY, MISSING
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.common import (
    exported,
    layouts_of,
    packed_ids,
    real_of,
    self_attention_maps,
    sequences_of,
    summed_cross_entropy,
    tie,
)
from fastformer.apps.models.embeddings import Embedding
from fastformer.apps.models.initialisation import initialise
from fastformer.apps.models.settings import ModelSettings
from fastformer.apps.models.sizes import LARGEST, MOST_LAYERS, describe_size
from fastformer.apps.settings import inherited, setting
from fastformer.apps.text import LanguageBatch
from fastformer.nn.layers import TransformerEncoderLayer
from fastformer.nn.stacks import TransformerEncoder
from fastformer.packing import Layout

LanguageEmbeddings = Literal["separate", "tied"]
# The settings of a decoder as Vaswani et al. (2017) and Liu et al. (2018) have it, where the defaults are others.
CLASSICAL: dict[str, Any] = {"activation": "relu", "norm": "layer", "bias": True, "positions": "sinusoidal"}


class LanguageConfig(ModelSettings):
    """Everything that decides the shape of a `LanguageModel`; stored with every checkpoint.

    Layers are of the kind of Llama's by default, which learn more from as many tokens than those of 2017 (`CLASSICAL`):
    the figures stand in the documentation.
    """

    vocabulary: int = setting(MISSING, "size of the vocabulary", at_least=1, at_most=LARGEST, derived="the tokenizer")
    _: KW_ONLY
    feed_forward: int = inherited(
        ModelSettings, "feed_forward", default=1376, before=2048
    )  # of three matrices: as 2,064 of two
    activation: str = inherited(ModelSettings, "activation", default="swiglu", before="relu")
    norm: str = inherited(ModelSettings, "norm", default="rms", before="layer")
    bias: bool = inherited(ModelSettings, "bias", default=False, before=True)
    positions: str = inherited(ModelSettings, "positions", default="rotary", before="sinusoidal")
    layers: int = setting(6, "layers of the decoder", at_least=1, at_most=MOST_LAYERS)
    embedding_dropout: float | None = setting(
        None, "dropout of the embeddings, positions added; unset: dropout", at_least=0, below=1
    )
    output_dropout: float = setting(
        0.0, "dropout of the hidden states before the output projection", at_least=0, below=1
    )
    embeddings: str = setting(
        "tied", "tied: the embedding is the output projection", choices=get_args(LanguageEmbeddings)
    )
    output_bias: bool = setting(False, "a bias in the output projection")
    pad_id: int = setting(1, "id of the padding token", at_least=0, below="vocabulary", derived="the tokenizer")
    bos_id: int = setting(2, "id of the begin token", at_least=0, below="vocabulary", derived="the tokenizer")
    eos_id: int = setting(3, "id of the end token", at_least=0, below="vocabulary", derived="the tokenizer")

    @property
    def matrix_numbers(self) -> int:
        """How many numbers the weight matrices have: all parameters but biases and norms."""
        positions = self.max_positions if self.positions == "learned" else 0
        rows = self.vocabulary * (1 if self.embeddings == "tied" else 2) + positions
        return rows * self.d_model + self.numbers_in_layers(self.layers)


class LanguageModel(nn.Module):
    """Embedding and decoder; `output` projects hidden states to logits.

    The decoder is a stack of encoder layers: without a source to attend to, causality is all that sets them apart.
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        embedding_dropout = c.dropout if c.embedding_dropout is None else c.embedding_dropout
        self.embedding = Embedding(
            c.vocabulary, c.d_model, c.embedded_positions, c.max_positions, c.scale_embeddings, embedding_dropout
        )
        self.decoder = TransformerEncoder(c.made(TransformerEncoderLayer, causal=True), c.layers, c.final())
        self.output = nn.Linear(c.d_model, c.vocabulary, bias=c.output_bias)
        initialise(self, c)
        tie(self)
        self.register_load_state_dict_post_hook(tie)  # type: ignore[no-untyped-call]

    def tied(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the modules that share a weight: which takes it, and whose it is."""
        return [(self.output, self.embedding.tokens)] if self.config.embeddings == "tied" else []

    def forward(self, ids: Tensor, lengths: Tensor | Layout) -> Tensor:
        """Compute the hidden states of the real positions, packed in order: `[T, D]`.

        Args:
            ids: int64, packed `[T]` or padded at the end `[B, length]`.
            lengths: int64 `[B]`, of each document or piece of one; on the CPU, so that nothing waits for the device.
                Zero is allowed, and so is B = 0. Or their layout, which torch.compile needs.

        Raises:
            ValueError: ids is of another shape, or a length is beyond what learned positions hold.
        """
        if exported(lengths):
            real = real_of("ids", ids, lengths)
            hidden = self.decoder(self.embedding.padded(ids), src_key_padding_mask=~real, is_causal=True)[real]
        else:
            ids, layout = packed_ids("ids", ids, lengths)
            x = self.embedding(ids, layout.positions, layout.max_length)  # [T, D]
            hidden = self.decoder.packed(x, layout, causal=True)
        return functional.dropout(hidden, self.config.output_dropout if self.training else 0.0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states `[..., D]` to logits `[..., V]`."""
        return self.output(hidden)  # type: ignore[no-any-return]

    @overload
    def attention_maps(self, ids: Tensor, lengths: None = None) -> Tensor: ...

    @overload
    def attention_maps(self, ids: Tensor, lengths: Tensor | Layout) -> list[Tensor]: ...

    @torch.no_grad()
    def attention_maps(self, ids: Tensor, lengths: Tensor | Layout | None = None) -> Tensor | list[Tensor]:
        """Compute every attention weight for one text, or for each of several; call `.eval()` first.

        In training, dropout takes some of them away.

        Args:
            ids: int64 `[T]`, one text with what stands before it; or several, as `forward` takes them.
            lengths: of several, as `forward` takes them.

        Returns:
            `[layers, H, T, T]`: row t is how position t spreads over those up to itself. With lengths,
            a list of one such tensor for each of the B texts, of its own T.

        Raises:
            ValueError: T is beyond what learned positions hold, or ids are of another shape.
        """
        packed, layout = sequences_of("ids", ids, lengths)
        x = self.embedding(packed, layout.positions, layout.max_length)
        maps = self_attention_maps(self.decoder, x, layout, causal=True)[1]
        return maps[0] if lengths is None else maps


def language_model_loss(
    model: LanguageModel, batch: LanguageBatch, label_smoothing: float = 0.0, counted: Tensor | None = None
) -> Tensor:
    """Sum of the cross entropy over the real tokens of a batch, fp32, in nats; padding never takes part.

    Args:
        model: may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.
        batch: packed, or padded at the end.
        label_smoothing: share of the probability spread over all classes.
        counted: int64, the positions of a packed batch whose predictions count, on its device; the others are read
            only, and never projected. None: all.
    """
    (layout,) = layouts_of(batch, "lengths")
    hidden, target = model(batch.ids_in, layout), batch.ids_out
    if counted is not None:
        hidden, target = hidden[counted], target[counted]
    return summed_cross_entropy(model.output, hidden, target, layout, label_smoothing)


def describe(config: LanguageConfig) -> str:
    """Parameters and shape of a model, in words."""
    return (
        f"{describe_size(LanguageModel, config)}: {config.layers} layers, d_model {config.d_model}, heads "
        f"{config.heads}, feed_forward {config.feed_forward}, vocabulary {config.vocabulary}, embeddings "
        f"{config.embeddings}"
    )
