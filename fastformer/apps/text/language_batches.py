"""Batches of language models: windows of documents or of a stream, without padding.

A document is read as bos + tokens + eos, and each token but bos is predicted exactly once, from the tokens before it. A
document longer than `context` is cut every `context` predictions: a window begins with the last token that the previous
one predicted, and has no earlier context. So the number of predictions depends neither on the context nor on the
batches, and perplexities can be compared.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastformer.settings import check_value

from .batch import LanguageBatch
from .batches import EpochBatches, cuts_by_tokens
from .encoding import EncodedDocuments, Ints, ranges


@dataclass(frozen=True)
class Pieces:
    """Windows of a stream: piece i reads ``stream[starts[i] : starts[i] + lengths[i]]`` and predicts it one id later.

    `stream` int32 [total], bos + tokens + eos of every document; `starts` and `lengths` int64 [pieces].
    """

    stream: NDArray[np.int32]
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Ints) -> "Pieces":
        """Return the pieces at `indices`, in that order."""
        return Pieces(self.stream, self.starts[indices], self.lengths[indices])

    @property
    def predictions(self) -> int:
        """Number of predictions: each token of the stream but the first of a document, once."""
        return int(self.lengths.sum())


def cut_documents(documents: EncodedDocuments, context: int, first_id: int | None = None) -> Pieces:
    """Put bos and eos around every document and cut it into pieces of at most `context` predictions, in order.

    first_id: an id in place of bos, such as eos, which stands before the first line of a stream. Raises ``ValueError``
    if `context` is below 1.
    """
    check_value("context", context, int, at_least=1)
    special = documents.special_ids
    first_id = special.bos_id if first_id is None else first_id
    stream, lengths = documents.documents.with_special(first=first_id, last=special.eos_id)
    predictions = lengths - 1
    counts = -(-predictions // context)  # pieces of each document
    begins = context * ranges(np.zeros_like(counts), counts)[0]  # of each piece in its document
    starts = np.repeat(np.cumsum(lengths) - lengths, counts) + begins
    return Pieces(stream.astype(np.int32), starts, np.minimum(context, np.repeat(predictions, counts) - begins))


def collate_pieces(pieces: Pieces, indices: Ints) -> LanguageBatch:
    """Return one batch of the pieces at `indices`, in that order."""
    lengths = pieces.lengths[indices]
    positions, _ = ranges(pieces.starts[indices], lengths)  # [T]
    ids_in, ids_out = (torch.from_numpy(pieces.stream[i].astype(np.int64)) for i in (positions, positions + 1))
    return LanguageBatch(ids_in, ids_out, torch.from_numpy(lengths))


class LanguageBatches(EpochBatches[LanguageBatch]):
    """The batches of each epoch: at most `tokens` tokens each, of pieces that predict at most `context` tokens.

    The pieces are in random order, or with ``shuffle=False`` in the order of the documents, for validation.

    Raises ``ValueError`` if `context` is below 1, `tokens` is less than `context`, or there are no documents.
    """

    def __init__(
        self, documents: EncodedDocuments, *, context: int, tokens: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.pieces = cut_documents(documents, context)
        super().__init__(len(self.pieces), seed, shuffle)
        if tokens < context:
            raise ValueError(f"tokens={tokens} is less than context={context}: a batch must hold at least one piece")
        self.context, self.tokens = context, tokens

    def _plan(self, random: np.random.Generator) -> list[Ints]:
        order = self._order(random)
        return np.split(order, cuts_by_tokens(self.pieces.lengths[None, order], self.tokens))

    def _collate(self, indices: Ints) -> LanguageBatch:
        return collate_pieces(self.pieces, indices)


class ColumnBatches(EpochBatches[LanguageBatch]):
    """The batches of a stream of N tokens in columns, as in PyTorch's tutorials; they are the same in each epoch.

    The tokens become `columns` columns of L = N // columns; the last N % columns tokens are left out. A batch is a
    window of `context` rows (bptt) of all columns, and predicts for each token the one below it. So L - 1 tokens of
    each column are predicted an epoch, and the last window is short.

    Raises ``ValueError`` if `columns` or `context` is below 1, or a column would have fewer than two tokens.
    """

    def __init__(self, documents: EncodedDocuments, *, columns: int, context: int) -> None:
        check_value("columns", columns, int, at_least=1)
        check_value("context", context, int, at_least=1)
        stream = documents.documents.with_special(last=documents.special_ids.eos_id)[0].astype(np.int32)
        rows = len(stream) // columns
        if rows < 2:
            raise ValueError(f"columns={columns} is too many for {len(stream):,} tokens: each column needs two")
        super().__init__(rows - 1, shuffle=False)
        self.table = stream[: rows * columns].reshape(columns, rows)  # [columns, L]
        self.context = context

    def _plan(self, random: np.random.Generator) -> list[Ints]:
        return np.split(self._order(random), range(self.context, self._count, self.context))

    def _collate(self, rows: Ints) -> LanguageBatch:
        windows = (self.table[:, i : i + len(rows)] for i in (rows[0], rows[0] + 1))
        ids_in, ids_out = (torch.from_numpy(window.astype(np.int64).reshape(-1)) for window in windows)
        return LanguageBatch(ids_in, ids_out, torch.from_numpy(np.full(len(self.table), len(rows))))
