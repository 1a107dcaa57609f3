"""Corpora: sentence pairs, and documents of lines for language models; how they are read and split.

Every line of a document ends with eos, as the published token counts of WikiText have it. Where a document begins
decides what a model may look back on; it changes neither the number of lines nor that of the tokens.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from fastformer.settings import check_value

from .files import TextError, iterate_lines, read_lines

DocumentKind = Literal["line", "article", "file"]
DOCUMENT_KINDS = ("line", "article", "file")

# WikiText writes the title of an article as "= Title =" and its sections as "= = Section = =".
_TITLE = re.compile(r"= (?!= ).+ =")


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: ``source[i]`` is translated by ``target[i]``.

    `dropped_*` count the pairs that are no use, `beyond` those that a limit left out.
    """

    source: list[str]
    target: list[str]
    name: str = "corpus"
    dropped_empty: int = 0
    dropped_copies: int = 0
    beyond: int = 0

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise TextError(f"{self.name}: {len(self.source):,} source lines but {len(self.target):,} target lines")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Sequence[int], name: str) -> "ParallelCorpus":
        """Return the pairs at `indices`, in that order, under a name of their own."""
        return ParallelCorpus([self.source[i] for i in indices], [self.target[i] for i in indices], name=name)

    def __str__(self) -> str:
        notes = [f"{self.name}: {len(self):,} pairs"]
        if self.dropped_empty:
            notes.append(f"{self.dropped_empty:,} with an empty side dropped")
        if self.dropped_copies:
            notes.append(f"{self.dropped_copies:,} copies of held-out pairs dropped")
        if self.beyond:
            notes.append(f"{self.beyond:,} more left out")
        return ", ".join(notes)


def read_parallel(
    source_path: str | Path, target_path: str | Path, name: str | None = None, limit: int | None = None
) -> ParallelCorpus:
    """Read two line-aligned files; pairs of which a side is blank are dropped and counted, spaces at the ends cut.

    limit: the most pairs to take, the first ones; None: all. The others are read, checked and counted, but not kept.

    Raises what `read_lines` raises, and ``TextError`` when the line counts differ or no pair is left.
    """
    source: list[str] = []
    target: list[str] = []
    lines, empty, beyond = [0, 0], 0, 0
    for left, right in zip_longest(iterate_lines(source_path), iterate_lines(target_path)):
        lines[0], lines[1] = lines[0] + (left is not None), lines[1] + (right is not None)
        left, right = (left or "").strip(), (right or "").strip()
        if limit is not None and len(source) >= limit:
            beyond += 1
        elif left and right:
            source.append(left)
            target.append(right)
        else:
            empty += 1
    if lines[0] != lines[1]:
        raise TextError(
            f"{source_path} has {lines[0]:,} lines but {target_path} has {lines[1]:,}: "
            "line i of one must translate line i of the other"
        )
    if not source:
        raise TextError(f"{source_path} and {target_path}: every pair of lines has an empty side")
    return ParallelCorpus(source, target, name or Path(source_path).name, dropped_empty=empty, beyond=beyond)


def split(
    corpus: ParallelCorpus, validation: int, test: int, seed: int
) -> tuple[ParallelCorpus, ParallelCorpus, ParallelCorpus]:
    """Shuffle a corpus and split it in training, validation and test pairs with no pair in common.

    Disjoint in content, not only in line number: the held-out pairs are distinct, and every further copy of one is
    dropped from training (Europarl repeats its formulas thousands of times). Raises ``ValueError`` for a negative
    count, and ``TextError`` when fewer than one distinct pair would be left for training.
    """
    for name, value in (("validation", validation), ("test", test)):
        check_value(name, value, int, at_least=0)
    order = np.random.default_rng(seed).permutation(len(corpus)).tolist()
    held: dict[tuple[str, str], int] = {}
    train, copies = [], 0
    for i in order:
        pair = (corpus.source[i], corpus.target[i])
        if pair in held:
            copies += 1
        elif len(held) < validation + test:
            held[pair] = i
        else:
            train.append(i)
    if not train:
        raise TextError(
            f"{corpus.name}: {len(corpus):,} pairs ({len(held):,} distinct) leave none for training "
            f"after {validation:,} for validation and {test:,} for test"
        )
    chosen = list(held.values())
    left = corpus.take(train, "train")
    left = replace(left, dropped_empty=corpus.dropped_empty, dropped_copies=copies, beyond=corpus.beyond)
    return left, corpus.take(chosen[:validation], "valid"), corpus.take(chosen[validation:], "test")


@dataclass(frozen=True)
class TextCorpus:
    """Documents of lines, stripped and without line ends; lines of no word are lines too."""

    documents: list[list[str]]
    name: str = "corpus"

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lines(self) -> list[str]:
        """The lines of all documents."""
        return [line for document in self.documents for line in document]

    @property
    def words(self) -> int:
        """Words between spaces, and one end of line (<eos>) a line."""
        return sum(len(line.split()) + 1 for line in self.lines)

    def __str__(self) -> str:
        return f"{self.name}: {len(self):,} documents, {self.words:,} words (one <eos> a line counted)"


def cut_lines(lines: Sequence[str], document: DocumentKind) -> list[list[str]]:
    """Return documents of the lines of a file: each line by itself, the articles of WikiText, or all lines as one.

    What stands before the first title belongs to the first article. Raises ``ValueError`` for another kind, and where
    articles are asked for and no line is a title.
    """
    check_value("document", document, str, choices=DOCUMENT_KINDS)
    if document == "line":
        return [[line] for line in lines]
    if document == "file":
        return [list(lines)]
    # A title stands between lines without words; inside an article a formula may look like one.
    blank = [not line.strip() for line in ("", *lines, "")]
    titles = [i for i, line in enumerate(lines) if blank[i] and blank[i + 2] and _TITLE.fullmatch(line)]
    if not titles:
        raise ValueError("document='article' needs titles such as '= Title =' on lines of their own; there is none")
    bounds = [0, *titles[1:], len(lines)]
    return [list(lines[start:end]) for start, end in pairwise(bounds)]


def read_text(path: str | Path, document: DocumentKind = "line", name: str | None = None) -> TextCorpus:
    """Read the documents of a UTF-8 file, plain or compressed; spaces at both ends of a line are dropped.

    Raises as `read_lines` and `cut_lines` do, and ``TextError`` when the file holds no word.
    """
    lines = [line.strip() for line in read_lines(path)]
    if not any(lines):
        raise TextError(f"{path}: holds no word")
    return TextCorpus(cut_lines(lines, document), name or Path(path).name)


def hold_out(keys: Sequence[Hashable], share: float, seed: int, what: str) -> tuple[list[int], list[int], list[int]]:
    """Draw which of a text's parts are for training, validation and testing; return their indices, ascending.

    A part with the same key as an earlier one goes where that one went, so that none is learned by heart.

    Args:
        keys: of each part, what makes it another one.
        share: of the different ones, for each of the two held-out sets.
        seed: of the draw.
        what: the parts are, for the message.

    Raises:
        TextError: there are too few for three sets.
    """
    alike: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        alike.setdefault(key, []).append(index)
    groups = list(alike.values())
    held = max(1, round(share * len(groups)))
    if len(groups) < 2 * held + 1:
        raise TextError(
            f"{len(groups):,} different {what} are too few to hold {held:,} out for validation and as many for testing"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    train, valid, test = (
        sorted(i for group in part for i in groups[group])
        for part in (order[2 * held :], order[:held], order[held : 2 * held])
    )
    return train, valid, test


def split_text(corpus: TextCorpus, share: float, seed: int) -> tuple[TextCorpus, TextCorpus, TextCorpus]:
    """Split a text in training, validation and test documents, drawn at random.

    Each held-out part gets `share` of all. A document with the same lines as an earlier one goes where that one went.
    Raises ``TextError`` when there are too few documents for three parts.
    """
    try:
        parts = hold_out([tuple(document) for document in corpus.documents], share, seed, "documents")
    except TextError as error:
        raise TextError(f"{corpus.name}: {error}; give valid_text and test_text, or cut smaller documents") from None
    train, valid, test = (
        TextCorpus([corpus.documents[i] for i in part], name)
        for part, name in zip(parts, ("train", "valid", "test"), strict=True)
    )
    return train, valid, test
