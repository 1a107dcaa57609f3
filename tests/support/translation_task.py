"""Small translation models, a torch.nn twin to compare with, and a task that a model learns in seconds."""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.apps.text import Batch, EncodedPairs, Sequences, SpecialIds, collate
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, translation_loss

UNK, PAD, BOS, EOS = 0, 1, 2, 3
IDS = SpecialIds(UNK, PAD, BOS, EOS)


def config(**changes: Any) -> TranslationConfig:
    settings = {
        "source_vocabulary": 17,
        "target_vocabulary": 17,
        "d_model": 12,
        "heads": 3,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "feed_forward": 20,
        "dropout": 0.0,
    }
    return TranslationConfig(**{**settings, **changes})


def random_model(seed: int = 0, **changes: Any) -> TranslationModel:
    """Return a model whose norms and biases are random too, so that swapped ones show."""
    torch.manual_seed(seed)
    model = TranslationModel(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_ids(length: int, generator: torch.Generator, vocabulary: int = 17) -> list[int]:
    return torch.randint(4, vocabulary, (length,), generator=generator).tolist()


def random_batch(lengths: list[tuple[int, int]], seed: int = 0, packed: bool = True, vocabulary: int = 17) -> Batch:
    """Return a batch of sentences of these (source, target) lengths, without special ids."""
    generator = torch.Generator().manual_seed(seed)
    source, target = zip(*([random_ids(n, generator, vocabulary) for n in pair] for pair in lengths), strict=True)
    return pairs_batch(source, target, packed)


def pairs_batch(source: Any, target: Any, packed: bool = True) -> Batch:
    return collate(EncodedPairs(Sequences.from_lists(source), Sequences.from_lists(target), IDS, IDS), packed)


def split_rows(batch: Batch) -> tuple[Tensor, ...]:
    """Return the source of each sentence of a packed batch."""
    return torch.split(batch.source, batch.source_lengths.tolist())


def paper_positions(length: int, width: int) -> Tensor:
    """Return the table of Vaswani et al. 2017, section 3.5, element by element."""
    table = torch.zeros(length, width, dtype=torch.float64)
    for position in range(length):
        for column in range(width):
            i = column // 2
            angle = torch.tensor(position / 10000 ** (2 * i / width), dtype=torch.float64)
            table[position, column] = angle.sin() if column % 2 == 0 else angle.cos()
    return table


class TorchTwin(nn.Module):
    """The same model written with torch.nn.Transformer on padded batches."""

    def __init__(self, c: TranslationConfig) -> None:
        super().__init__()
        self.c = c
        self.source_tokens = nn.Embedding(c.source_vocabulary, c.d_model)
        self.target_tokens = nn.Embedding(c.target_vocabulary, c.d_model)
        learned = c.positions == "learned"
        self.source_positions = nn.Embedding(c.max_positions, c.d_model) if learned else None
        self.target_positions = nn.Embedding(c.max_positions, c.d_model) if learned else None
        with warnings.catch_warnings():
            # torch says that its nested-tensor path will not be used; the twin must not use it.
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.transformer = nn.Transformer(
                c.d_model,
                c.heads,
                c.encoder_layers,
                c.decoder_layers,
                c.feed_forward,
                c.dropout,
                c.activation,
                layer_norm_eps=c.norm_eps,
                batch_first=True,
                norm_first=c.norm_first,
                bias=c.bias,
            )
        self.transformer.encoder.enable_nested_tensor = self.transformer.encoder.use_nested_tensor = False
        if not c.final_norm:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.output = nn.Linear(c.d_model, c.target_vocabulary, bias=c.output_bias)
        if c.embeddings == "shared":
            self.source_tokens.weight = self.target_tokens.weight
        if c.embeddings != "separate":
            self.output.weight = self.target_tokens.weight

    @staticmethod
    def name(name: str) -> str:
        """Return the name here of a parameter of `TranslationModel`."""
        for side in ("source", "target"):
            for part in ("tokens", "positions"):
                name = name.replace(f"{side}_embedding.{part}", f"{side}_{part}")
        return f"transformer.{name}" if name.startswith(("encoder", "decoder")) else name

    def copy(self, model: TranslationModel) -> "TorchTwin":
        """Take the parameters of `model`, every one of them."""
        self.load_state_dict({self.name(name): value for name, value in model.state_dict().items()})
        return self.train(model.training)

    def embed(self, ids: Tensor, tokens: nn.Embedding, positions: nn.Embedding | None) -> Tensor:
        x = tokens(ids) * (self.c.d_model**0.5 if self.c.scale_embeddings else 1.0)
        if positions is not None:
            return x + positions.weight[: ids.shape[1]]
        return x + paper_positions(ids.shape[1], self.c.d_model).float().to(x.dtype)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        ahead = torch.ones(target_in.shape[1], target_in.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embed(source, self.source_tokens, self.source_positions),
            self.embed(target_in, self.target_tokens, self.target_positions),
            tgt_mask=ahead,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target_in == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.output(hidden)

    def loss(self, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Return the loss of a padded batch."""
        logits = self(batch.source, batch.target_in).flatten(0, 1)
        target = batch.target_out.flatten()
        return F.cross_entropy(logits, target, ignore_index=PAD, label_smoothing=label_smoothing, reduction="sum")


def reverse_batch(seed: int, sentences: int, longest: int = 7) -> Batch:
    """Translate a sentence into its reverse."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (sentences,), generator=generator).tolist()
    source = [random_ids(n, generator, 12) for n in lengths]
    return pairs_batch(source, [ids[::-1] for ids in source])


@functools.cache
@torch.enable_grad()
def reversing_model() -> TranslationModel:
    """Return a model that learned to reverse sentences, well enough to end them; shared, so leave it as it is."""
    steps = 200
    torch.manual_seed(0)
    model = TranslationModel(
        config(source_vocabulary=12, target_vocabulary=12, d_model=32, heads=4, encoder_layers=1, feed_forward=64)
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 40, 1 - n / (steps + 1)))
    for step in range(steps):
        batch = reverse_batch(step, 64)
        optimizer.zero_grad()
        (translation_loss(model, batch) / batch.tokens).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def weights_of(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the weights of each attention of a model, in order of the calls: `[heads, T, S]` of sequence 0."""
    weights = []

    def watch(module: nn.MultiheadAttention) -> None:
        original = module.forward

        def forward(*args, **kwargs):
            weights.append(original(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1][0])
            return original(*args, **kwargs)

        module.forward = forward

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            watch(module)
    model(*inputs)
    return weights
