"""Small language models, a torch.nn twin to compare with, and texts that only a model with a memory predicts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel
from fastformer.apps.text import EncodedDocuments, LanguageBatch, Sequences
from fastformer.apps.text.language_batches import collate_pieces, cut_documents
from tests.support.translation_task import IDS, paper_positions, random_ids


def config(**changes: Any) -> LanguageConfig:
    given = {"vocabulary": 17, "d_model": 12, "heads": 3, "layers": 2, "feed_forward": 20, "dropout": 0.0} | CLASSICAL
    return LanguageConfig(**{**given, **changes})


def random_model(seed: int = 0, **changes: Any) -> LanguageModel:
    """A model whose norms and biases are random too, so that swapped ones show."""
    torch.manual_seed(seed)
    model = LanguageModel(config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_batch(lengths: Sequence[int], seed: int = 0, vocabulary: int = 17) -> LanguageBatch:
    """A batch of random ids with documents of these lengths, bos counted; zero is allowed."""
    generator = torch.Generator().manual_seed(seed)
    documents = [random_ids(n, generator, vocabulary) for n in lengths]
    read = [i for ids in documents for i in [IDS.bos_id, *ids][: len(ids)]]
    predicted = [i for ids in documents for i in ids]
    return LanguageBatch(*(torch.tensor(x, dtype=torch.int64) for x in (read, predicted, list(lengths))))


class TorchTwin(nn.Module):
    """The same model written with torch.nn.TransformerEncoder on padded batches: a causal mask and a padding mask."""

    def __init__(self, c: LanguageConfig) -> None:
        super().__init__()
        self.c = c
        self.tokens = nn.Embedding(c.vocabulary, c.d_model)
        self.positions = nn.Embedding(c.max_positions, c.d_model) if c.positions == "learned" else None
        layer = nn.TransformerEncoderLayer(
            c.d_model, c.heads, c.feed_forward, c.dropout, c.activation, c.norm_eps, True, c.norm_first, c.bias
        )
        norm = nn.LayerNorm(c.d_model, c.norm_eps, bias=c.bias) if c.final_norm else None
        self.decoder = nn.TransformerEncoder(layer, c.layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(c.d_model, c.vocabulary, bias=c.output_bias)
        if c.embeddings == "tied":
            self.output.weight = self.tokens.weight

    @staticmethod
    def name(ours: str) -> str:
        """The name here of a parameter of `LanguageModel`."""
        return ours.removeprefix("embedding.")

    def copy(self, model: LanguageModel) -> "TorchTwin":
        """Take the parameters of `model`, every one of them; in training mode, where torch has no fast path."""
        self.load_state_dict({self.name(name): value for name, value in model.state_dict().items()})
        return self.train()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits `[B, L, V]` of padded ids `[B, L]`."""
        length = ids.shape[1]
        x = self.tokens(ids) * (self.c.d_model**0.5 if self.c.scale_embeddings else 1.0)
        table = paper_positions(length, self.c.d_model).float().to(x.dtype)
        x = x + (table if self.positions is None else self.positions.weight[:length])
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.arange(length) >= lengths[:, None]
        return self.output(self.decoder(x, mask=ahead, src_key_padding_mask=padding))

    def loss(self, batch: LanguageBatch, label_smoothing: float = 0.0) -> Tensor:
        """Of a padded batch."""
        logits = self(batch.ids_in, batch.lengths)
        padding = torch.arange(logits.shape[1]) >= batch.lengths[:, None]
        target = batch.ids_out.masked_fill(padding, -100).flatten()
        return F.cross_entropy(logits.flatten(0, 1), target, label_smoothing=label_smoothing, reduction="sum")


STEPS_VOCABULARY = 11  # four special ids and the numbers 0-6


def steps_documents(count: int, seed: int) -> EncodedDocuments:
    """Documents that count modulo 7 from a random start in random steps of 1 to 6, 3 to 12 numbers long.

    Any number follows any other (but never itself), so knowing the last one is of no help: it takes the last two.
    """
    random = np.random.default_rng(seed)
    drawn = zip(random.integers(0, 7, count), random.integers(1, 7, count), random.integers(3, 13, count), strict=True)
    documents = [[4 + int(start + i * step) % 7 for i in range(n)] for start, step, n in drawn]
    return EncodedDocuments(Sequences.from_lists(documents), IDS)


def bigram_loss(documents: EncodedDocuments) -> float:
    """Mean cross entropy of the best prediction from the last token alone, counted on the documents themselves."""
    pieces = cut_documents(documents, context=10**6)
    batch = collate_pieces(pieces, np.arange(len(pieces)))
    counts = torch.zeros(STEPS_VOCABULARY, STEPS_VOCABULARY, dtype=torch.float64)
    counts.index_put_((batch.ids_in, batch.ids_out), torch.ones((), dtype=torch.float64), accumulate=True)
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return float(-(counts * share.clamp(min=1e-300).log()).sum() / counts.sum())
