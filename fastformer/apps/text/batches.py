"""Batches of an epoch: only here are special ids added, sequences shifted and padded.

A pair becomes source = tokens + eos, target_in = bos + tokens, target_out = tokens + eos, in training and, through
`collate_source`, in inference. A document becomes bos + tokens + eos. Sequences of classifiers are not changed.

The order of the data depends on (seed, epoch) only, so a run resumed at batch i of epoch n sees exactly the batches
that the uninterrupted run would have seen. There is no prefetching, because a batch takes only 0.3 ms.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastformer.settings import check_value

from .batch import Batch, LabelledBatch, LanguageBatch, SequenceBatch
from .corpora import ParallelCorpus
from .encoding import EncodedDocuments, EncodedPairs, Ints, Sequences, encode_pairs, ranges
from .sentencepiece_tokenizer import seed_sampling, warn_of_salted_sampling
from .tokenizer import SpecialIds, Tokenizer

B = TypeVar("B", bound=SequenceBatch)


class EpochBatches(Generic[B]):
    """The batches of each epoch, of `count` sequences; raises ``ValueError`` for none.

    `divide(order, random)` returns the indices in each batch of sequences in a random order, or in that of the data;
    `collate` makes a batch of indices.
    """

    def __init__(
        self,
        count: int,
        divide: Callable[[Ints, np.random.Generator], list[Ints]],
        collate: Callable[[Ints], B],
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if count == 0:
            raise ValueError("there are no sequences to make batches of")
        self.seed, self.shuffle, self._count, self._divide, self._collate = seed, shuffle, count, divide, collate
        self._planned: tuple[int, list[Ints]] | None = None

    def plan(self, epoch: int) -> list[Ints]:
        """Return the sequences of each batch of an epoch, as indices; the plan of the last epoch is cached."""
        if self._planned is None or self._planned[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            order = random.permutation(self._count) if self.shuffle else np.arange(self._count)
            self._planned = epoch, self._divide(order, random)
        return self._planned[1]

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self.plan(epoch))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[B]:
        """Yield the batches of an epoch, from number `start` on; resumes exactly from (epoch, batches already seen)."""
        for indices in self.plan(epoch)[start:]:
            yield self._collate(indices)


def _divide_by_count(order: Ints, count: int) -> list[Ints]:
    return np.split(order, range(count, len(order), count))


def divide_by_tokens(order: Ints, lengths: NDArray[np.int64], tokens: int, packed: bool = True) -> list[Ints]:
    """Return batches that hold as many sequences as fit: no side has more than `tokens` positions.

    lengths: int64 `[sides, sequences]`, each from 1 to `tokens`. Positions are tokens, with padding unless `packed`.
    """
    lengths = lengths[:, order]
    most = tokens // int(lengths.min()) + 1  # one sequence more than can fit
    cuts: list[int] = []
    first = 0
    while True:
        window = lengths[:, first : first + most]
        longest = np.maximum.accumulate(window, axis=1)
        positions = window.cumsum(1) if packed else longest * np.arange(1, window.shape[1] + 1)
        fitting = int((positions.max(0) <= tokens).sum())
        if fitting == window.shape[1]:
            return np.split(order, np.array(cuts, np.int64))
        first += fitting
        cuts.append(first)


def _lay_out(sequences: Sequences, pad_id: int, packed: bool) -> Tensor:
    if packed:
        return torch.from_numpy(sequences.ids.astype(np.int64))  # [total]
    lengths = sequences.lengths
    padded = np.full((len(lengths), int(lengths.max(initial=0))), pad_id, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = sequences.ids
    return torch.from_numpy(padded)  # [B, longest]


def collate(pairs: EncodedPairs, packed: bool = True) -> Batch:
    """Return one batch of all the pairs, in their order; 4,000 tokens a side take 0.3 ms on one CPU core."""
    source, source_lengths = collate_source(pairs.source, pairs.source_ids, packed)
    special = pairs.target_ids
    target_in = pairs.target.with_special(first=special.bos_id)
    target_out = pairs.target.with_special(last=special.eos_id)
    inputs, targets = (_lay_out(each, special.pad_id, packed) for each in (target_in, target_out))
    return Batch(source, source_lengths, inputs, targets, torch.from_numpy(target_in.lengths))


def collate_source(
    sequences: Sequences | Sequence[Sequence[int]], special_ids: SpecialIds, packed: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the source side of a batch: ids with eos, packed `[S_total]` or padded `[B, S]`, and lengths `[B]`.

    For inference: ``collate_source(tokenizer.encode_batch(lines), tokenizer.special_ids)``.
    """
    if not isinstance(sequences, Sequences):
        sequences = Sequences.from_lists(sequences)
    sequences = sequences.with_special(last=special_ids.eos_id)
    return _lay_out(sequences, special_ids.pad_id, packed), torch.from_numpy(sequences.lengths)


class Batches(EpochBatches[Batch]):
    """The batches of sentence pairs of each epoch, by number of sentences or by a budget of tokens.

    Args:
        pairs: encoded sentence pairs.
        sentences: pairs in a batch.
        tokens: or the most positions of a batch on either side; special ids count, and padding unless packed.
        seed: of the order.
        shuffle: another random order each epoch; False: the order of the pairs, for validation.
        bucket: sort by (target, source) length with ties in random order, and shuffle the batches: padding falls from
            55 % to 7 % on Multi30k with 4,000 tokens a batch. Packed batches have none, so they may also be random.
        packed: without padding.

    Raises ``ValueError`` unless `sentences` or `tokens` is given and not both, if there are no pairs, or if one pair is
    larger than the budget.
    """

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        sentences: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        bucket: bool = True,
        packed: bool = True,
    ) -> None:
        super().__init__(len(pairs), self._batches_of, lambda i: collate(pairs.take(i), packed), seed, shuffle)
        if (sentences is None) == (tokens is None):
            raise ValueError(f"give either sentences or tokens, got sentences={sentences} and tokens={tokens}")
        self.pairs, self.sentences, self.tokens, self.bucket, self.packed = pairs, sentences, tokens, bucket, packed
        self._lengths = np.stack([pairs.source.lengths, pairs.target.lengths]) + 1  # [2, pairs]
        longest = self._lengths.max(0)
        if tokens is not None and longest.max() > tokens:
            raise ValueError(
                f"batches of {tokens} tokens are too small for sentence pair {longest.argmax() + 1}, which has "
                f"{longest.max()} tokens with eos: raise their size, or lower max_length"
            )

    def _batches_of(self, order: Ints, random: np.random.Generator) -> list[Ints]:
        if self.bucket:  # lexsort is stable: pairs of equal length stay in the order above
            order = order[np.lexsort(self._lengths[:, order])]
        if self.sentences is not None:
            batches = _divide_by_count(order, self.sentences)
        else:
            assert self.tokens is not None
            batches = divide_by_tokens(order, self._lengths, self.tokens, self.packed)
        if self.shuffle and self.bucket:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return batches

    def padding_share(self, epoch: int = 0) -> float:
        """Return the share of padding in the positions of an epoch's padded batches, both sides (packed: saved)."""
        positions = sum(len(batch) * int(self._lengths[:, batch].max(1).sum()) for batch in self.plan(epoch))
        return 1 - int(self._lengths.sum()) / positions


class SampledBatches:
    """Batches of sentence pairs whose pieces are drawn anew each epoch: subword regularisation, or BPE dropout.

    The pieces depend on (seed, epoch) only, so that a resumed run sees those of the uninterrupted one. With
    sentencepiece from 0.2.2 on, this holds only within one process, and a warning says so. Arguments and errors are as
    of `encode_pairs` and `Batches`; no pair is longer than `tokens`.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        sampling: float,
        *,
        max_length: int = 256,
        too_long: Literal["drop", "truncate"] = "drop",
        **options: Any,
    ) -> None:
        warn_of_salted_sampling()
        longest = min(max_length, options.get("tokens") or max_length)

        @functools.lru_cache(maxsize=1)
        def draw(epoch: int) -> Batches:
            seed_sampling(options.get("seed", 0), epoch)
            pairs = encode_pairs(corpus, source_tokenizer, target_tokenizer, longest, too_long, sampling)
            return Batches(pairs, **options)

        draw(0)  # raises for wrong arguments
        self._batches = draw

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return self._batches(epoch).batches_in(epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from number `start` on."""
        return self._batches(epoch).epoch(epoch, start)


@dataclass(frozen=True)
class Pieces:
    """Windows of a stream: piece i reads ``stream[starts[i] : starts[i] + lengths[i]]`` and predicts it one id later.

    `stream` int32 [total], such as bos + tokens + eos of every document; `starts` and `lengths` int64 [pieces].
    """

    stream: NDArray[np.int32]
    starts: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: Ints) -> "Pieces":
        """Return the pieces at `indices`, in that order."""
        return replace(self, starts=self.starts[indices], lengths=self.lengths[indices])

    @property
    def predictions(self) -> int:
        """Number of predictions: each token of the stream but the first of a document, once."""
        return int(self.lengths.sum())

    def collate(self, indices: Ints) -> LanguageBatch:
        """Return one batch of the pieces at `indices`, in that order."""
        lengths = self.lengths[indices]
        positions, _ = ranges(self.starts[indices], lengths)  # [T]
        ids_in, ids_out = (torch.from_numpy(self.stream[i].astype(np.int64)) for i in (positions, positions + 1))
        return LanguageBatch(ids_in, ids_out, torch.from_numpy(lengths))


def cut_documents(documents: EncodedDocuments, context: int, first_id: int | None = None) -> Pieces:
    """Put bos and eos around every document and cut it into pieces of at most `context` predictions, in order.

    A piece begins with the last token that the previous one predicted, and has no earlier context. So each token but
    bos is predicted exactly once, whatever the context and the batches, and perplexities can be compared.

    first_id: an id in place of bos, such as eos, which stands before the first line of a stream.
    """
    check_value("context", context, int, at_least=1)
    special = documents.special_ids
    first_id = special.bos_id if first_id is None else first_id
    stream = documents.documents.with_special(first=first_id, last=special.eos_id)
    predictions = stream.lengths - 1
    counts = -(-predictions // context)  # pieces of each document
    begins = context * ranges(np.zeros_like(counts), counts)[0]  # of each piece in its document
    starts = np.repeat(stream.offsets[:-1], counts) + begins
    return Pieces(stream.ids, starts, np.minimum(context, np.repeat(predictions, counts) - begins))


class LanguageBatches(EpochBatches[LanguageBatch]):
    """The batches of each epoch: at most `tokens` tokens each, of pieces that predict at most `context` tokens.

    The pieces are in random order, or with ``shuffle=False`` in the order of the documents, for validation. Raises
    ``ValueError`` if `tokens` is less than `context`, or there are no documents.
    """

    def __init__(
        self, documents: EncodedDocuments, *, context: int, tokens: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        pieces = cut_documents(documents, context)
        if tokens < context:
            raise ValueError(f"tokens={tokens} is less than context={context}: a batch must hold at least one piece")
        divide = lambda order, _: divide_by_tokens(order, pieces.lengths[None], tokens)  # noqa: E731
        super().__init__(len(pieces), divide, pieces.collate, seed, shuffle)


class ColumnBatches(EpochBatches[LanguageBatch]):
    """The batches of a stream of N tokens in columns, as in PyTorch's tutorials; they are the same in each epoch.

    The tokens become `columns` columns of L = N // columns; the last N % columns tokens are left out. A batch is a
    window of `context` rows (bptt) of all columns, and predicts for each token the one below it. So L - 1 tokens of
    each column are predicted an epoch, and the last window is short.

    Raises ``ValueError`` if a column would have fewer than two tokens.
    """

    def __init__(self, documents: EncodedDocuments, *, columns: int, context: int) -> None:
        stream = documents.documents.with_special(last=documents.special_ids.eos_id).ids
        rows = len(stream) // columns  # L
        if rows < 2:
            raise ValueError(f"columns={columns} is too many for {len(stream):,} tokens: each column needs two")
        begins = np.arange(0, rows - 1, context)  # of the windows, in each column
        starts = begins[:, None] + rows * np.arange(columns)  # [windows, columns]
        lengths = np.minimum(context, rows - 1 - begins)
        pieces = Pieces(stream, starts.reshape(-1), np.repeat(lengths, columns))
        super().__init__(len(pieces), lambda order, _: _divide_by_count(order, columns), pieces.collate, shuffle=False)


class LabelledBatches(EpochBatches[LabelledBatch]):
    """The batches of labelled sequences of each epoch, packed, of `size` sequences each (the last may have fewer).

    `labels` are sequences of the same lengths, or an integer array `[N]`; the loss ignores -100. `seed` and `shuffle`
    as of `Batches`. Raises ``ValueError`` if sequences and labels differ in number or length, or there are none.
    """

    def __init__(
        self, sequences: Sequences, labels: Sequences | Ints, *, size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(len(sequences), lambda order, _: _divide_by_count(order, size), self._batch_of, seed, shuffle)
        lengths = labels.lengths if isinstance(labels, Sequences) else sequences.lengths
        if len(labels) != len(sequences) or (lengths != sequences.lengths).any():
            raise ValueError("labels must be one for each sequence, or one for each token of each sequence")
        self.sequences, self.labels = sequences, labels
        self.unit = "tokens" if isinstance(labels, Sequences) else "texts"  # what the loss is summed over

    def _batch_of(self, indices: Ints) -> LabelledBatch:
        chosen = self.sequences.take(indices)
        labels = self.labels.take(indices).ids if isinstance(self.labels, Sequences) else self.labels[indices]
        # "same_kind" refuses labels that are no integers.
        ids, targets, lengths = (
            torch.from_numpy(x.astype(np.int64, casting="same_kind")) for x in (chosen.ids, labels, chosen.lengths)
        )
        return LabelledBatch(ids, targets, lengths)
