"""The decoder-only Transformer for language modelling (Liu et al. 2018, section 4.2.3), from ids to hidden states.

Documents, or pieces of them, are packed: attention is causal and within one document, and positions count from the
document's first token. `forward` returns hidden states, not logits: the loss projects them in chunks.

Letters: B documents, T positions (packed: of all documents together), D model width, V vocabulary.
"""

from dataclasses import KW_ONLY, MISSING
from typing import Any

from torch import Tensor, nn

from fastformer import functional
from fastformer.apps.models.common import SingleStack, output_cross_entropy, tie
from fastformer.apps.models.settings import ModelSettings, initialise
from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.settings import LARGEST, inherited, setting
from fastformer.apps.text import LanguageBatch
from fastformer.nn.stacks import TransformerEncoder
from fastformer.packing import Layout

# The settings of the decoder of Vaswani et al. (2017) and Liu et al. (2018) that differ from the defaults.
CLASSICAL: dict[str, Any] = {"activation": "relu", "norm": "layer", "bias": True, "positions": "sinusoidal"}


class LanguageConfig(ModelSettings):
    """The hyperparameters of a `LanguageModel`; stored with every checkpoint.

    By default layers are Llama's, which learn more from the same number of tokens than those of 2017 (`CLASSICAL`);
    docs/language-models.md has the measurements.
    """

    vocabulary: int = setting(MISSING, "size of the vocabulary", at_least=1, at_most=LARGEST, derived="the tokenizer")
    _: KW_ONLY
    feed_forward: int = inherited(ModelSettings, "feed_forward", default=1376)  # of three matrices: as 2,064 of two
    activation: str = inherited(ModelSettings, "activation", default="swiglu")
    norm: str = inherited(ModelSettings, "norm", default="rms")
    bias: bool = inherited(ModelSettings, "bias", default=False)
    positions: str = inherited(ModelSettings, "positions", default="rotary")
    layers: int = setting(6, "layers of the decoder", at_least=1, at_most=MOST_LAYERS)
    embedding_dropout: float | None = setting(
        None, "dropout of the sum of embeddings and positions; unset: dropout", at_least=0, below=1
    )
    output_dropout: float = setting(
        0.0, "dropout of the hidden states before the output projection", at_least=0, below=1
    )
    embeddings: str = setting("tied", "tied: the embedding is the output projection", choices=("separate", "tied"))
    output_bias: bool = setting(False, "a bias in the output projection")
    pad_id: int = setting(1, "id of the padding token", at_least=0, below="vocabulary", derived="the tokenizer")
    bos_id: int = setting(2, "id of the begin token", at_least=0, below="vocabulary", derived="the tokenizer")
    eos_id: int = setting(3, "id of the end token", at_least=0, below="vocabulary", derived="the tokenizer")

    @property
    def matrix_numbers(self) -> int:
        """The number of elements in all weight matrices: every parameter except biases and norms."""
        positions = self.max_positions if self.positions == "learned" else 0
        rows = self.vocabulary * (1 if self.embeddings == "tied" else 2) + positions
        return rows * self.d_model + self.numbers_in_layers(self.layers)


class LanguageModel(SingleStack):
    """Embedding and decoder, a stack of causal encoder layers; `output` projects hidden states to logits."""

    stack_name, causal = "decoder", True

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.embedding = c.new_embedding(c.vocabulary, c.embedding_dropout)
        self.decoder = c.new_stack(TransformerEncoder, c.layers, causal=True)
        self.output = nn.Linear(c.d_model, c.vocabulary, bias=c.output_bias)
        initialise(self, c)
        tie(self)
        self.register_load_state_dict_post_hook(tie)  # type: ignore[no-untyped-call]

    def tied(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs (module, source) of modules that share a weight: the module takes that of the source."""
        return [(self.output, self.embedding.tokens)] if self.config.embeddings == "tied" else []

    def forward(self, ids: Tensor, lengths: Tensor | Layout) -> Tensor:  # type: ignore[override]
        """Compute the hidden states of the real tokens, packed in order: `[T, D]`.

        Args:
            ids: int64, packed `[T]` or padded at the end `[B, length]`.
            lengths: int64 `[B]`, of each document or piece of one; on the CPU, so that the host never waits for the
                device. Zero is allowed, and so is B = 0. Or a `Layout`, which torch.compile needs.

        Raises:
            ValueError: ids has another shape, or a length exceeds the number of learned positions.
        """
        hidden = super().forward(ids, lengths)
        return functional.dropout(hidden, self.config.output_dropout if self.training else 0.0)


def language_model_loss(model: LanguageModel, batch: LanguageBatch, label_smoothing: float = 0.0) -> Tensor:
    """Return the summed cross entropy of a batch over real tokens, fp32, in nats; padding is excluded.

    `model` may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.
    """
    hidden = model(batch.ids_in, batch.lengths)
    return output_cross_entropy(model.output, hidden, batch.ids_out, batch.lengths, label_smoothing)
