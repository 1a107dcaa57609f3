"""Documents to batches of a language model: special ids, splitting, shifting and packing; there is no padding.

A document is read as bos + tokens + eos, and each of these but bos is predicted exactly once, from what stands before
it. A document with more than `context` of them is cut every `context` predictions: a piece begins with the token that
the piece before it predicted last, and sees nothing further back. Cutting evenly instead would give the average token
less to look back on. So the number of predictions depends neither on the context nor on the batches, and perplexities
compare; the corpus as one document gives the classical windows of a stream, documents of one line give each line alone.

For evaluation, pieces may overlap: each but a document's first reads the `overlap` tokens before it again, without
predicting them a second time, so that no prediction but a document's first ones looks back on fewer than `overlap`
tokens. It moves on by context - overlap predictions, its stride, and no piece is longer than `context`.

A batch is one run of tokens that holds as many whole pieces as its budget allows, from all over the corpus: a model
that takes the lengths keeps them apart. The order depends on (seed, epoch) only, so a run resumed at batch i of epoch
n sees exactly the batches that the uninterrupted run would have seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastformer.packing import Layout
from fastformer.settings import check_value

from .encoding import EncodedDocuments, Ints
from .process_shares import rows_of, share_of
from .sides import Side, on_device


@dataclass(frozen=True)
class LanguageBatch:
    """B pieces of documents, one after another: `ids_out[t]` is what follows `ids_in[t]`. Ids are int64 [T].

    The lengths stay on the CPU, so that no device has to be waited for to lay a batch out.
    """

    ids_in: Tensor  # bos + tokens, or a window of that
    ids_out: Tensor  # tokens + eos, or the same window
    lengths: Tensor  # [B]

    SIDES: ClassVar[tuple[Side, ...]] = (Side("lengths", ("ids_in",), ("ids_out",)),)
    layouts: ClassVar[tuple[Layout, ...]] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens to predict, eos included: what a loss is divided by."""
        return int(self.lengths.sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "LanguageBatch":
        """The batch with its ids on `device`, in one transfer with their `layouts`; the lengths stay on the CPU.

        Nothing waits for the device, whatever `non_blocking` says.
        """
        return on_device(self, self.SIDES, device)

    def share(self, rank: int, world: int) -> "LanguageBatch | None":
        """The pieces of process `rank` of `world`; None where it gets none."""
        rows = share_of(self.lengths, rank, world)
        if rows.start == rows.stop:
            return None
        ids_in, ids_out = (rows_of(x, self.lengths, rows) for x in (self.ids_in, self.ids_out))
        return LanguageBatch(ids_in, ids_out, self.lengths[rows])


@dataclass(frozen=True)
class Pieces:
    """Windows of a stream: piece i reads ``stream[starts[i] : starts[i] + lengths[i]]`` and predicts it one id later.

    Its first `reread[i]` predictions are those of the piece before it, and do not count.

    `stream` int32 [total], bos + tokens + eos of every document; `starts`, `lengths` and `reread` int64 [pieces].
    """

    stream: NDArray[np.int32]
    starts: Ints
    lengths: Ints
    reread: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Ints) -> "Pieces":
        """The pieces at `indices`, in that order."""
        return Pieces(self.stream, self.starts[indices], self.lengths[indices], self.reread[indices])

    @property
    def predictions(self) -> int:
        """Tokens that count: every token of the stream that can be predicted, once."""
        return int((self.lengths - self.reread).sum())


def cut_documents(documents: EncodedDocuments, context: int, overlap: int = 0) -> Pieces:
    """Put bos and eos around every document and cut it into pieces of at most `context` predictions, in order.

    Raises ``ValueError`` when `context` is below 1, and when `overlap` is below 0 or not below `context`.
    """
    special = documents.special_ids
    stream, lengths = documents.documents.with_special(first=special.bos_id, last=special.eos_id)
    # bos is not predicted.
    return cut_windows(stream.astype(np.int32), np.cumsum(lengths) - lengths, lengths - 1, context, overlap)


def cut_windows(stream: NDArray[np.int32], first: Ints, predictions: Ints, context: int, overlap: int) -> Pieces:
    """Windows of at most `context` predictions, of which `overlap` were made before, in every part of a stream.

    Args:
        stream: int32 [total].
        first: int64 [parts], where each part begins in it.
        predictions: int64 [parts], how many each part has.
        context: most tokens that a window reads.
        overlap: how many of them the window before it has read too; a part's first window has none before it.

    Raises:
        ValueError: `context` is below 1, or `overlap` is below 0 or not below `context`.
    """
    check_value("context", context, int, at_least=1)
    check_value("overlap", overlap, int, {"context": context}, at_least=0, below="context")
    stride = context - overlap
    # What lies within the overlap, a window has predicted that began before; a part with any prediction has a window.
    counts = np.maximum(-(-(predictions - overlap) // stride), np.minimum(predictions, 1))  # [parts]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each window in its part
    lengths = np.minimum(context, np.repeat(predictions, counts) - number * stride)
    return Pieces(stream, np.repeat(first, counts) + number * stride, lengths, np.where(number > 0, overlap, 0))


def collate_pieces(pieces: Pieces, indices: Ints) -> LanguageBatch:
    """One batch of the pieces at `indices`, in that order."""
    lengths = pieces.lengths[indices]
    offsets = np.cumsum(lengths) - lengths
    where = np.arange(lengths.sum()) + np.repeat(pieces.starts[indices] - offsets, lengths)  # [T]
    ids_in, ids_out = (torch.from_numpy(pieces.stream[i].astype(np.int64)) for i in (where, where + 1))
    return LanguageBatch(ids_in, ids_out, torch.from_numpy(lengths))


def counted_positions(pieces: Pieces, indices: Ints) -> Tensor:
    """Where the predictions that count stand in the batch of the pieces at `indices`: int64, in order."""
    lengths, reread = pieces.lengths[indices], pieces.reread[indices]
    counted = lengths - reread
    before = np.cumsum(reread)  # positions up to here that do not count
    return torch.from_numpy(np.arange(counted.sum()) + np.repeat(before, counted))


class LanguageBatches:
    """The batches of each epoch: at most `tokens` tokens each, of pieces that predict at most `context` tokens.

    The pieces are in random order, or with ``shuffle=False`` in that of the documents, for validation.

    Raises ``ValueError`` when `context` is below 1, when `tokens` is less than that, and when there are no documents.
    """

    def __init__(
        self, documents: EncodedDocuments, *, context: int, tokens: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        if len(documents) == 0:
            raise ValueError("there are no documents to make batches of")
        self.pieces = cut_documents(documents, context)
        if tokens < context:
            raise ValueError(f"tokens={tokens} is less than context={context}: a batch must have room for a piece")
        self.context, self.tokens, self.seed, self.shuffle = context, tokens, seed, shuffle
        self._planned: tuple[int, list[Ints]] | None = None

    def plan(self, epoch: int) -> list[Ints]:
        """The pieces of each batch of an epoch, as indices; the last epoch asked for is remembered."""
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._plan(epoch)
        return self._planned[1]

    def _plan(self, epoch: int) -> list[Ints]:
        count = len(self.pieces)
        order = np.random.default_rng((self.seed, epoch)).permutation(count) if self.shuffle else np.arange(count)
        ends = np.cumsum(self.pieces.lengths[order])
        cuts: list[int] = []
        before = 0  # tokens in the batches so far
        while ends[-1] - before > self.tokens:
            cuts.append(int(np.searchsorted(ends, before + self.tokens, side="right")))  # the first that does not fit
            before = int(ends[cuts[-1] - 1])
        return np.split(order, cuts)

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return int(self.pieces.lengths.max())

    def batches_in(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return len(self.plan(epoch))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[LanguageBatch]:
        """The batches of an epoch, from number `start` on: (epoch, batches already seen) resumes exactly."""
        for indices in self.plan(epoch)[start:]:
            yield collate_pieces(self.pieces, indices)
