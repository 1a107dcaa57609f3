"""Cut documents into pieces for a language model, and collate pieces into batches without padding.

A document is read as bos + tokens + eos, and each token but bos is predicted exactly once, from the tokens before it. A
document longer than `context` is cut every `context` predictions: a piece begins with the last token that the previous
piece predicted, and has no earlier context. So the number of predictions depends neither on the context nor on the
batches, and perplexities can be compared. For evaluation, pieces may overlap: each but a document's first reads the
`overlap` tokens before it again, without predicting them a second time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastformer.settings import check_value

from .batch import LanguageBatch
from .encoding import EncodedDocuments, Ints


@dataclass(frozen=True)
class Pieces:
    """Windows of a stream: piece i reads ``stream[starts[i] : starts[i] + lengths[i]]`` and predicts it one id later.

    Its first `reread[i]` predictions are those of the previous piece, and do not count.

    `stream` int32 [total], bos + tokens + eos of every document; `starts`, `lengths` and `reread` int64 [pieces].
    """

    stream: NDArray[np.int32]
    starts: Ints
    lengths: Ints
    reread: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Ints) -> "Pieces":
        """Return the pieces at `indices`, in that order."""
        return Pieces(self.stream, self.starts[indices], self.lengths[indices], self.reread[indices])

    @property
    def predictions(self) -> int:
        """Number of predictions that count: each token of the stream but the first of a document, once."""
        return int((self.lengths - self.reread).sum())


def cut_documents(documents: EncodedDocuments, context: int, overlap: int = 0) -> Pieces:
    """Put bos and eos around every document and cut it into pieces of at most `context` predictions, in order.

    Raises ``ValueError`` if `context` is below 1, or `overlap` is below 0 or not below `context`.
    """
    special = documents.special_ids
    stream, lengths = documents.documents.with_special(first=special.bos_id, last=special.eos_id)
    # bos is not predicted.
    return cut_windows(stream.astype(np.int32), np.cumsum(lengths) - lengths, lengths - 1, context, overlap)


def token_stream(documents: EncodedDocuments) -> NDArray[np.int32]:
    """Return the documents one after another, each with its end of line: int32 [N]."""
    return documents.documents.with_special(last=documents.special_ids.eos_id)[0].astype(np.int32)


def cut_stream(documents: EncodedDocuments, context: int, overlap: int = 0) -> Pieces:
    """Cut the stream of all documents into windows of at most `context` predictions, in order.

    The first token is predicted from an end of line, which stands in for the beginning. Raises as `cut_documents`.
    """
    stream = np.concatenate([np.array([documents.special_ids.eos_id], np.int32), token_stream(documents)])
    return cut_windows(stream, np.zeros(1, np.int64), np.array([len(stream) - 1]), context, overlap)


def cut_windows(stream: NDArray[np.int32], first: Ints, predictions: Ints, context: int, overlap: int) -> Pieces:
    """Cut the documents of a stream, which begin at `first` and have `predictions` each, both int64 [documents]."""
    check_value("context", context, int, at_least=1)
    check_value("overlap", overlap, int, {"context": context}, at_least=0, below="context")
    stride = context - overlap
    # The previous window has predicted the overlap; a document with any prediction has at least one window.
    counts = np.maximum(-(-(predictions - overlap) // stride), np.minimum(predictions, 1))  # [documents]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each window in its document
    lengths = np.minimum(context, np.repeat(predictions, counts) - number * stride)
    return Pieces(stream, np.repeat(first, counts) + number * stride, lengths, np.where(number > 0, overlap, 0))


def collate_pieces(pieces: Pieces, indices: Ints) -> LanguageBatch:
    """Return one batch of the pieces at `indices`, in that order."""
    lengths = pieces.lengths[indices]
    offsets = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) + np.repeat(pieces.starts[indices] - offsets, lengths)  # [T]
    ids_in, ids_out = (torch.from_numpy(pieces.stream[i].astype(np.int64)) for i in (positions, positions + 1))
    return LanguageBatch(ids_in, ids_out, torch.from_numpy(lengths))


def counted_positions(pieces: Pieces, indices: Ints) -> Tensor:
    """Return the positions of the predictions that count in the batch of the pieces at `indices`: int64, in order."""
    reread = pieces.reread[indices]
    counted = pieces.lengths[indices] - reread
    skipped = np.cumsum(reread)  # positions up to a piece that do not count
    return torch.from_numpy(np.arange(counted.sum()) + np.repeat(skipped, counted))
