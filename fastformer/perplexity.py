"""How well a language model predicts a text: every token once, in pieces no longer than its context."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fastformer.models import LanguageModel, language_model_loss
from fastformer.text import (
    EncodedDocuments,
    Pieces,
    TextCorpus,
    Tokenizer,
    collate_pieces,
    cut_documents,
    cut_stream,
    encode_lines,
)

_EVALUATION_TOKENS = 4096  # in a batch; more did not make it faster on a CPU


def encode_corpus(corpus: TextCorpus, tokenizer: Tokenizer, stream: str) -> EncodedDocuments:
    """The documents of a corpus as ids; as a stream, its lines are one document."""
    documents = [corpus.lines] if stream == "columns" else corpus.documents
    try:
        return encode_lines(documents, tokenizer)
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from None


def cut_corpus(documents: EncodedDocuments, context: int, stream: str) -> Pieces:
    """The pieces that predict every token of a text once."""
    return cut_stream(documents, context) if stream == "columns" else cut_documents(documents, context)


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text: `nats` is the sum of -log p over `tokens` predicted tokens, eos included.

    `words` are those of the same text at spaces, and an <eos> a line; `unknown` tokens stood where <unk> was predicted.
    """

    nats: float
    tokens: int
    words: int
    unknown: int

    @property
    def per_token(self) -> float:
        """exp(nats / tokens)."""
        return _perplexity(self.nats / self.tokens)

    @property
    def per_word(self) -> float:
        """exp(nats / words): compares models of different tokenizers, where none of them has unknown tokens."""
        return _perplexity(self.nats / self.words)

    def __str__(self) -> str:
        unknown = f", {self.unknown:,} of them <unk>" if self.unknown else ""
        text = f"perplexity {self.per_token:.2f} per token ({self.tokens:,} predicted, <eos> counted{unknown})"
        if self.tokens != self.words:
            text += f"; {self.per_word:.2f} per word ({self.words:,} words, one <eos> a line counted)"
        return text


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


@torch.no_grad()
def perplexity(model: LanguageModel, corpus: TextCorpus, tokenizer: Tokenizer, context: int, stream: str) -> Perplexity:
    """The perplexity of a text, every token of it predicted once.

    Args:
        model: call `.eval()` first.
        corpus: the text; documents without a token are left out.
        tokenizer: of the model.
        context: most tokens that a prediction looks back on.
        stream: "documents" or "columns", as the model was trained.

    Raises:
        ValueError: context is below 1, or no document has a token.
    """
    documents = encode_corpus(corpus, tokenizer, stream)
    pieces = cut_corpus(documents, context, stream)
    nats = _total_loss(model, pieces)
    unknown = int(np.count_nonzero(documents.documents.ids == tokenizer.unk_id))
    # Lines that were left out as documents without a token are an <eos> each.
    return Perplexity(nats, int(pieces.lengths.sum()), corpus.words - documents.dropped, unknown)


def _total_loss(model: LanguageModel, pieces: Pieces) -> float:
    device = model.output.weight.device
    total = 0.0
    ends = np.cumsum(pieces.lengths)
    # Whole pieces, about as many tokens a batch as asked for.
    cuts = np.searchsorted(ends, np.arange(_EVALUATION_TOKENS, ends[-1], _EVALUATION_TOKENS), side="left") + 1
    for indices in np.split(np.arange(len(pieces)), np.unique(cuts)):
        if len(indices):
            batch = collate_pieces(pieces, indices)
            total += float(language_model_loss(model, batch.to(device)))
    return total
