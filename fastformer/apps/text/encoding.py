"""Encode corpora as compact token ids: sentence pairs for translation, documents for language models.

Each side is one flat array with offsets: 29,000 pairs are 4 MB instead of 26 MB of lists. No special ids are stored;
`collate` and `cut_documents` add them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastformer.settings import check_value

from .corpora import ParallelCorpus
from .files import check_texts
from .tokenizer import SpecialIds, Tokenizer

_CHUNK = 10_000  # sentences encoded at a time, so that the lists of Python integers stay small

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Sequences of token ids, without special ids: sequence i is ``ids[offsets[i] : offsets[i + 1]]``.

    `ids` int32 [total], `offsets` int64 [count + 1].
    """

    ids: NDArray[np.int32]
    offsets: Ints

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> "Sequences":
        """Flatten lists of ids."""
        offsets = _offsets(np.fromiter(map(len, lists), np.int64, len(lists)))
        return cls(np.fromiter((i for ids in lists for i in ids), np.int32, int(offsets[-1])), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        ids: list[int] = self.ids[self.offsets[index] : self.offsets[index + 1]].tolist()
        return ids

    @property
    def lengths(self) -> Ints:
        """Tokens in each sequence, int64 [count]."""
        return np.diff(self.offsets)

    def take(self, indices: Ints) -> "Sequences":
        """Return the sequences at `indices`, in that order."""
        starts = self.offsets[indices]
        return _gather(self.ids, starts, self.offsets[indices + 1] - starts)

    def count(self, token: int) -> int:
        """Return how often an id occurs."""
        return int(np.count_nonzero(self.ids == token))

    def cut(self, length: int) -> "Sequences":
        """Return the first `length` ids of each sequence."""
        return _gather(self.ids, self.offsets[:-1], np.minimum(self.lengths, length))

    def with_special(self, first: int | None = None, last: int | None = None) -> "Sequences":
        """Return all sequences, each with an id before or after it."""
        places = ((first, self.offsets[:-1]), (last, self.offsets[1:]))
        added = [(special, offsets) for special, offsets in places if special is not None]
        positions = np.stack([offsets for _, offsets in added], axis=1).reshape(-1)
        ids = np.insert(self.ids, positions, [special for special, _ in added] * len(self))
        return Sequences(ids, self.offsets + len(added) * np.arange(len(self) + 1))


def describe_unknown(count: int) -> str:
    """Return words about a number of unknown tokens; nothing for 0."""
    return f", {count:,} of them <unk>" if count else ""


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def ranges(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return starts[i] to starts[i] + lengths[i] - 1 for each i, one after another, and offsets as of `Sequences`."""
    offsets = _offsets(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


def _gather(ids: NDArray[np.int32], starts: Ints, lengths: Ints) -> Sequences:
    positions, offsets = ranges(starts, lengths)
    return Sequences(ids[positions], offsets)


@dataclass(frozen=True)
class EncodedPairs:
    """Encoded sentence pairs without special ids, the special ids of both sides, and counts of dropped and cut ones."""

    source: Sequences
    target: Sequences
    source_ids: SpecialIds
    target_ids: SpecialIds
    dropped: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Ints) -> "EncodedPairs":
        """Return the pairs at `indices`, in that order; the counts become 0."""
        return replace(self, source=self.source.take(indices), target=self.target.take(indices), dropped=0, truncated=0)

    def __str__(self) -> str:
        dropped = f", {self.dropped:,} pairs too long or empty dropped" if self.dropped else ""
        truncated = f", {self.truncated:,} pairs truncated" if self.truncated else ""
        tokens = f"{len(self.source.ids):,} source and {len(self.target.ids):,} target tokens"
        unknown = self.source.count(self.source_ids.unk_id) + self.target.count(self.target_ids.unk_id)
        return f"{len(self):,} pairs, {tokens}{describe_unknown(unknown)}{dropped}{truncated}"


def encode_pairs(
    corpus: ParallelCorpus,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    max_length: int = 256,
    too_long: Literal["drop", "truncate"] = "drop",
    sampling: float | None = None,
) -> EncodedPairs:
    """Encode a corpus.

    Pairs with an empty side are dropped and counted.

    Args:
        corpus, source_tokenizer, target_tokenizer: the pairs, and the tokenizer of each side.
        max_length: most tokens of a side, with the eos that `collate` adds.
        too_long: drop longer pairs, or truncate both sides to ``max_length - 1`` tokens; both are counted.
        sampling: draw pieces at random, with this alpha of `SentencePieceTokenizer.sample_batch`.

    Raises ``ValueError`` if no pair is left, or for another value of too_long.
    """
    if too_long not in ("drop", "truncate"):
        raise ValueError(f"too_long must be drop or truncate, not {too_long!r}")
    source = _encode(corpus.source, source_tokenizer, sampling)
    target = _encode(corpus.target, target_tokenizer, sampling)
    keep = np.minimum(source.lengths, target.lengths) > 0  # [pairs]
    long = keep & (np.maximum(source.lengths, target.lengths) >= max_length)
    if too_long == "drop":
        keep &= ~long
    indices = np.flatnonzero(keep)
    if len(indices) == 0:
        raise ValueError(f"{corpus.name}: no pair has between 1 and {max_length - 1} tokens a side; raise max_length")
    return EncodedPairs(
        source.take(indices).cut(max_length - 1),
        target.take(indices).cut(max_length - 1),
        source_tokenizer.special_ids,
        target_tokenizer.special_ids,
        dropped=len(corpus) - len(indices),
        truncated=int(np.count_nonzero(keep & long)),
    )


@dataclass(frozen=True)
class EncodedDocuments:
    """Encoded documents, none of them empty, without special ids; the special ids; and the count of dropped ones."""

    documents: Sequences
    special_ids: SpecialIds
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.documents)

    def __str__(self) -> str:
        dropped = f", {self.dropped:,} empty documents dropped" if self.dropped else ""
        unknown = describe_unknown(self.documents.count(self.special_ids.unk_id))
        return f"{len(self):,} documents, {len(self.documents.ids):,} tokens{unknown}{dropped}"


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer) -> EncodedDocuments:
    """Encode texts as documents of one line each; see `encode_lines`."""
    check_texts("lines", texts)
    return encode_lines([[text] for text in texts], tokenizer)


def encode_lines(documents: Sequence[Sequence[str]], tokenizer: Tokenizer) -> EncodedDocuments:
    """Encode documents of lines: eos separates lines, and the eos of the last line is that of the document.

    A document of one line without a token is dropped and counted. Raises ``ValueError`` if none is left.
    """
    lines = _encode([line for document in documents for line in document], tokenizer)
    lines = lines.with_special(last=tokenizer.eos_id)
    line_counts = np.fromiter(map(len, documents), np.int64, len(documents))
    bounds = lines.offsets[_offsets(line_counts)]  # the begin of each document in `lines.ids`, and the end of all
    sizes = np.diff(bounds) - 1  # the last eos belongs to the document
    indices = np.flatnonzero(sizes > 0)
    if len(indices) == 0:
        raise ValueError(f"none of the {len(sizes):,} documents has a token")
    sequences = _gather(lines.ids, bounds[indices], sizes[indices])
    return EncodedDocuments(sequences, tokenizer.special_ids, len(sizes) - len(indices))


def encode_source(lines: Sequence[str], tokenizer: Tokenizer, max_length: int) -> tuple[Sequences, int]:
    """Encode sentences for inference, cut to ``max_length - 1`` tokens as in training; also return how many were cut.

    Raises ``ValueError`` if `max_length` is less than 2, a token and eos.
    """
    check_value("max_length", max_length, int, at_least=2)
    sequences = _encode(lines, tokenizer)
    return sequences.cut(max_length - 1), int(np.count_nonzero(sequences.lengths >= max_length))


def _encode(lines: Sequence[str], tokenizer: Tokenizer, sampling: float | None = None) -> Sequences:
    chunks = [Sequences.from_lists([])]
    for start in range(0, len(lines), _CHUNK):
        chunk = lines[start : start + _CHUNK]
        ids = tokenizer.encode_batch(chunk) if sampling is None else tokenizer.sample_batch(chunk, sampling)
        chunks.append(Sequences.from_lists(ids))
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    return Sequences(np.concatenate([chunk.ids for chunk in chunks]), _offsets(lengths))
