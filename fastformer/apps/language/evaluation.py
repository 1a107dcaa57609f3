"""Perplexity of a language model: every token of a text is predicted once, in windows no longer than the context."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.apps.language.model import LanguageModel, language_model_loss
from fastformer.apps.text import EncodedDocuments, TextCorpus, Tokenizer, encode_lines
from fastformer.apps.text.batches import Pieces, cut_documents
from fastformer.host.devices import device_of

_EVALUATION_TOKENS = 4096  # in a batch; more did not make it faster on a CPU


def encode_corpus(corpus: TextCorpus, tokenizer: Tokenizer, stream: str) -> EncodedDocuments:
    """Encode the documents of a corpus; of a stream, all lines are one document."""
    documents = [corpus.lines] if stream == "columns" else corpus.documents
    try:
        return encode_lines(documents, tokenizer)
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from None


@dataclass(frozen=True)
class Perplexity:
    """The loss of a model on a text.

    Attributes:
        nats: sum of -log p over the predicted tokens.
        tokens: number of predicted tokens, eos included.
        words: number of words between spaces in the same text, with an <eos> a line.
        unknown: number of predicted tokens that are <unk>.
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
        """exp(nats / words), which compares models of different tokenizers without unknown tokens."""
        return _perplexity(self.nats / self.words)

    def __str__(self) -> str:
        unknown = f", {self.unknown:,} of them <unk>" if self.unknown else ""
        text = f"perplexity {self.per_token:.2f} per token ({self.tokens:,} predicted, <eos> counted{unknown})"
        if self.tokens != self.words:
            text += f"; {self.per_word:.2f} per word ({self.words:,} words, one <eos> a line counted)"
        return text


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


class HeldOutText:
    """A text, cut into pieces in which a model predicts every token once.

    Args:
        corpus: the text; documents without a token are skipped.
        tokenizer: the model's tokenizer.
        context: most tokens that a prediction looks back on.
        stream: "documents" or "columns", as the model was trained.

    Raises:
        ValueError: context is below 1, or no document has a token.
    """

    def __init__(self, corpus: TextCorpus, tokenizer: Tokenizer, context: int, stream: str) -> None:
        documents = encode_corpus(corpus, tokenizer, stream)
        self.pieces = cut_documents(documents, context, tokenizer.eos_id if stream == "columns" else None)
        self._unknown = int(np.count_nonzero(documents.documents.ids == tokenizer.unk_id))
        # Each skipped document is a line without a token, of which corpus.words counts the <eos>.
        self._words = corpus.words - documents.dropped

    @torch.no_grad()
    def perplexity(self, model: LanguageModel, indices: NDArray[np.int64] | None = None) -> Perplexity:
        """Compute the perplexity of the pieces at `indices`, or of all; call `model.eval()` first.

        For some of the pieces, words and unknown tokens are those of all, times the share of the tokens.
        """
        pieces = self.pieces if indices is None else self.pieces.take(indices)
        share = pieces.predictions / self.pieces.predictions
        words, unknown = round(share * self._words), round(share * self._unknown)
        return Perplexity(_total_loss(model, pieces), pieces.predictions, words, unknown)


def perplexity(model: LanguageModel, corpus: TextCorpus, tokenizer: Tokenizer, context: int, stream: str) -> Perplexity:
    """Compute the perplexity of a text; arguments and errors as in `HeldOutText`."""
    return HeldOutText(corpus, tokenizer, context, stream).perplexity(model)


def _total_loss(model: LanguageModel, pieces: Pieces) -> float:
    device = device_of(model)
    total = 0.0
    ends = np.cumsum(pieces.lengths)
    # Batches of whole pieces, with about _EVALUATION_TOKENS tokens each.
    cuts = np.searchsorted(ends, np.arange(_EVALUATION_TOKENS, ends[-1], _EVALUATION_TOKENS), side="left") + 1
    for indices in np.split(np.arange(len(pieces)), np.unique(cuts)):
        if len(indices):
            total += float(language_model_loss(model, pieces.collate(indices).to(device)))
    return total
