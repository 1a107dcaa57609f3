"""The encoder-decoder Transformer for translation (Vaswani et al. 2017), from ids to hidden states, without padding.

The model packs ids once, and layers compute real tokens only. `forward` returns hidden states, not logits:
`translation_loss` projects them in chunks.

Letters: B batch, T target and S source positions (packed: of all sentences together), D model width, V vocabulary.
"""

from dataclasses import KW_ONLY, MISSING

import torch
from torch import Tensor, nn

from fastformer.apps.models.common import check_sequences, exported_mask, output_cross_entropy, packed_ids, tie
from fastformer.apps.models.settings import ModelSettings, initialise
from fastformer.apps.models.sizes import MOST_LAYERS
from fastformer.apps.settings import LARGEST, inherited, setting
from fastformer.apps.text import Batch, Batches, EncodedPairs
from fastformer.functional.linear_cross_entropy.op import Reduction
from fastformer.host.devices import device_of
from fastformer.nn.stacks import TransformerDecoder, TransformerEncoder
from fastformer.packing import Layout


class TranslationConfig(ModelSettings):
    """The hyperparameters of a `TranslationModel`; stored with every checkpoint."""

    source_vocabulary: int = setting(
        MISSING, "size of the source vocabulary", at_least=1, at_most=LARGEST, derived="the tokenizer"
    )
    target_vocabulary: int = setting(
        MISSING, "size of the target vocabulary", at_least=1, at_most=LARGEST, derived="the tokenizer"
    )
    _: KW_ONLY
    encoder_layers: int = setting(6, "layers of the encoder", at_least=1, at_most=MOST_LAYERS)
    decoder_layers: int = setting(6, "layers of the decoder", at_least=1, at_most=MOST_LAYERS)
    final_norm: bool = inherited(ModelSettings, "final_norm", help="a norm after the last layer of each stack")
    embeddings: str = setting(
        "tied",
        "tied: target embedding is the output projection; shared: source embedding too",
        choices=("separate", "tied", "shared"),
    )
    output_bias: bool = setting(False, "a bias in the output projection")
    pad_id: int = setting(1, "id of the padding token", at_least=0, below="target_vocabulary", derived="the tokenizer")
    bos_id: int = setting(2, "id of the begin token", at_least=0, below="target_vocabulary", derived="the tokenizer")
    eos_id: int = setting(3, "id of the end token", at_least=0, below="target_vocabulary", derived="the tokenizer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embeddings == "shared" and self.source_vocabulary != self.target_vocabulary:
            raise ValueError(
                f"embeddings 'shared' needs one joint vocabulary, not {self.source_vocabulary} and "
                f"{self.target_vocabulary} entries"
            )

    @property
    def matrix_numbers(self) -> int:
        """The number of elements in all weight matrices: every parameter except biases and norms."""
        rows = self.target_vocabulary * (2 if self.embeddings == "separate" else 1)
        rows += self.source_vocabulary * (self.embeddings != "shared")
        rows += 2 * self.max_positions * (self.positions == "learned")
        layers = self.numbers_in_layers(self.encoder_layers) + self.numbers_in_layers(self.decoder_layers, True)
        return rows * self.d_model + layers


class TranslationModel(nn.Module):
    """Encoder, decoder and embeddings; `output` projects hidden states to logits."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        # Stacks first: the order decides which random numbers are left for the initial values.
        encoder = c.new_stack(TransformerEncoder, c.encoder_layers, causal=False)
        decoder = c.new_stack(TransformerDecoder, c.decoder_layers, causal=True)
        self.source_embedding = c.new_embedding(c.source_vocabulary)
        self.target_embedding = c.new_embedding(c.target_vocabulary)
        self.encoder, self.decoder = encoder, decoder
        self.output = nn.Linear(c.d_model, c.target_vocabulary, bias=c.output_bias)
        initialise(self, c)
        tie(self)
        self.register_load_state_dict_post_hook(tie)  # type: ignore[no-untyped-call]

    def tied(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return pairs (module, source) of modules that share a weight: the module takes that of the source."""
        source = self.target_embedding.tokens
        modules: list[nn.Module] = [self.source_embedding.tokens] if self.config.embeddings == "shared" else []
        modules += [] if self.config.embeddings == "separate" else [self.output]
        return [(module, source) for module in modules]

    def encode(self, source: Tensor, source_lengths: Tensor | Layout) -> tuple[Tensor, Layout]:
        """Encode source ids, packed `[S]` or padded `[B, S]`; return packed memory `[S, D]` and the layout."""
        ids, layout = packed_ids("source", source, source_lengths)
        x = self.source_embedding(ids, layout.positions, layout.max_length)
        return self.encoder.packed(x, layout), layout

    def forward(
        self, source: Tensor, source_lengths: Tensor | Layout, target_in: Tensor, target_lengths: Tensor | Layout
    ) -> Tensor:
        """Compute the hidden states of the real target positions, packed in order: `[T, D]`.

        Args:
            source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
            source_lengths: int64 `[B]`, on the CPU, so that the host never waits for the device; or a `Layout`, which
                torch.compile needs.
            target_in: int64 ids that begin with bos, packed `[T]` or padded `[B, T]`.
            target_lengths: likewise.
        """
        keys = exported_mask("source", source, source_lengths)
        queries = exported_mask("target_in", target_in, target_lengths)
        if keys is not None and queries is not None:
            memory = self.encoder(self.source_embedding.padded(source), src_key_padding_mask=~keys)
            masks = {"tgt_key_padding_mask": ~queries, "memory_key_padding_mask": ~keys}
            x = self.target_embedding.padded(target_in)
            return self.decoder(x, memory, **masks, tgt_is_causal=True)[queries]  # type: ignore[no-any-return]
        memory, source_layout = self.encode(source, source_lengths)
        ids, layout = packed_ids("target_in", target_in, target_lengths)
        x = self.target_embedding(ids, layout.positions, layout.max_length)
        return self.decoder.packed(x, layout, memory, source_layout)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states `[..., D]` to logits `[..., V]`."""
        return self.output(hidden)  # type: ignore[no-any-return]

    @torch.no_grad()
    def attention_maps(self, source: Tensor, target_in: Tensor) -> dict[str, Tensor]:
        """Compute every attention weight for one sentence pair; call `.eval()` first, or dropout sets some to 0.

        Args:
            source: int64 ids with eos, `[S]`.
            target_in: int64 ids that begin with bos, `[T]`.

        Returns:
            "encoder" `[layers, H, S, S]`, "decoder" `[layers, H, T, T]` and "cross" `[layers, H, T, S]`.
        """
        check_sequences(source=source, target_in=target_in)
        memory, encoder = self.encoder(self.source_embedding.padded(source[None]), need_weights=True)
        x = self.target_embedding.padded(target_in[None])
        _, decoder, cross = self.decoder(x, memory, tgt_is_causal=True, need_weights=True)
        return {"encoder": encoder[:, 0], "decoder": decoder[:, 0], "cross": cross[:, 0]}


def translation_loss(
    model: TranslationModel, batch: Batch, label_smoothing: float = 0.0, reduction: Reduction = "sum"
) -> Tensor:
    """Return the cross entropy of a batch over real target tokens, fp32, in nats: the sum, or `[T]` with "none".

    `model` may be wrapped (torch.compile, DistributedDataParallel), as long as `model.output` is reachable.
    """
    hidden = model(batch.source, batch.source_lengths, batch.target_in, batch.target_lengths)
    return output_cross_entropy(
        model.output, hidden, batch.target_out, batch.target_lengths, label_smoothing, reduction
    )


@torch.no_grad()
def corpus_loss(model: TranslationModel, pairs: EncodedPairs, tokens: int = 4096) -> float:
    """Compute the mean cross entropy per target token, eos included, in nats; call `.eval()` first."""
    device = device_of(model)
    longest = int(max(pairs.source.lengths.max(), pairs.target.lengths.max())) + 1
    total, count = 0.0, 0
    for batch in Batches(pairs, tokens=max(tokens, longest), shuffle=False).epoch(0):
        total += float(translation_loss(model, batch.to(device)))
        count += batch.tokens
    return total / count
