"""Read and split corpora: sentence pairs, and documents of lines for language models.

Every line of a document ends with eos, as in the published token counts of WikiText. The boundaries of documents limit
the context of a model; they change neither the number of lines nor the number of tokens.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fastformer.settings import check_value

from .files import TextError, iterate_lines, read_lines

DocumentKind = Literal["line", "article", "file"]
DOCUMENT_KINDS = get_args(DocumentKind)

# WikiText writes the title of an article as "= Title =" and its sections as "= = Section = =".
_TITLE = re.compile(r"= (?!= ).+ =")


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: ``source[i]`` is translated by ``target[i]``.

    `dropped_*` count unusable pairs, `beyond` the pairs that a limit excluded.
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
        """Return the pairs at `indices`, in that order, as a corpus with this name."""
        return ParallelCorpus([self.source[i] for i in indices], [self.target[i] for i in indices], name=name)

    def __str__(self) -> str:
        notes = {
            "with an empty side dropped": self.dropped_empty,
            "copies of held-out pairs dropped": self.dropped_copies,
            "more left out": self.beyond,
        }
        return ", ".join([f"{self.name}: {len(self):,} pairs", *(f"{n:,} {what}" for what, n in notes.items() if n)])


def read_parallel(
    source_path: str | Path, target_path: str | Path, name: str | None = None, limit: int | None = None
) -> ParallelCorpus:
    """Read two line-aligned files; strip spaces, and drop and count pairs with a blank side.

    limit: the most pairs to return, the first ones; None: all. Further pairs are read, checked and counted only.

    Raises the errors of `read_lines`, and ``TextError`` if the line counts differ or no pair is left.
    """
    source: list[str] = []
    target: list[str] = []
    source_lines = target_lines = empty = beyond = 0
    for line, translation in zip_longest(iterate_lines(source_path), iterate_lines(target_path)):
        source_lines, target_lines = source_lines + (line is not None), target_lines + (translation is not None)
        line, translation = (line or "").strip(), (translation or "").strip()
        if limit is not None and len(source) >= limit:
            beyond += 1
        elif line and translation:
            source.append(line)
            target.append(translation)
        else:
            empty += 1
    if source_lines != target_lines:
        raise TextError(
            f"{source_path} has {source_lines:,} lines but {target_path} has {target_lines:,}: "
            "line i of one must translate line i of the other"
        )
    if not source:
        raise TextError(f"{source_path} and {target_path}: every pair of lines has an empty side")
    return ParallelCorpus(source, target, name or Path(source_path).name, dropped_empty=empty, beyond=beyond)


def split(
    corpus: ParallelCorpus, validation: int, test: int, seed: int
) -> tuple[ParallelCorpus, ParallelCorpus, ParallelCorpus]:
    """Shuffle a corpus and split it into training, validation and test pairs with no pair in common.

    Held-out pairs are distinct, and copies of them are dropped from training (Europarl repeats formulas thousands of
    times). Raises ``ValueError`` for a negative count, and ``TextError`` if no pair would be left for training.
    """
    for name, value in (("validation", validation), ("test", test)):
        check_value(name, value, int, at_least=0)
    held_out: dict[tuple[str, str], int] = {}
    train = []
    for i in np.random.default_rng(seed).permutation(len(corpus)).tolist():
        pair = corpus.source[i], corpus.target[i]
        if pair not in held_out:
            if len(held_out) < validation + test:
                held_out[pair] = i
            else:
                train.append(i)
    if not train:
        raise TextError(
            f"{corpus.name}: {len(corpus):,} pairs ({len(held_out):,} distinct) leave none for training "
            f"after {validation:,} for validation and {test:,} for test"
        )
    chosen = list(held_out.values())
    copies = len(corpus) - len(train) - len(chosen)
    training = corpus.take(train, "train")
    training = replace(training, dropped_empty=corpus.dropped_empty, dropped_copies=copies, beyond=corpus.beyond)
    return training, corpus.take(chosen[:validation], "valid"), corpus.take(chosen[validation:], "test")


@dataclass(frozen=True)
class TextCorpus:
    """Documents of lines, stripped and without line ends; lines without a word are included."""

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
        """Number of words between spaces, plus one end of line (<eos>) a line."""
        return count_words(self.lines)

    def __str__(self) -> str:
        return f"{self.name}: {len(self):,} documents, {self.words:,} words (one <eos> a line counted)"


def count_words(lines: Sequence[str]) -> int:
    """Return the number of words between spaces, plus one <eos> a line."""
    return sum(len(line.split()) + 1 for line in lines)


def cut_lines(lines: Sequence[str], document: DocumentKind) -> list[list[str]]:
    """Divide the lines of a file into documents: each line, each article of WikiText, or all lines as one.

    Lines before the first title belong to the first article. Raises ``ValueError`` for another kind, and for articles
    if no line is a title.
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

    Raises the errors of `read_lines` and `cut_lines`, and ``TextError`` if the file holds no word.
    """
    lines = [line.strip() for line in read_lines(path)]
    if not any(lines):
        raise TextError(f"{path}: holds no word")
    return TextCorpus(cut_lines(lines, document), name or Path(path).name)


def hold_out(keys: Sequence[Hashable], share: float, seed: int, what: str) -> tuple[list[int], list[int], list[int]]:
    """Draw `share` of the distinct items each for validation and testing, the rest for training.

    Items with equal keys go to the same set, so that no held-out item is seen in training. Returns the indices of each
    set, ascending. Raises ``TextError``, which calls the items `what`, if they are too few for three sets.
    """
    copies: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        copies.setdefault(key, []).append(index)
    groups = list(copies.values())
    count = max(1, round(share * len(groups)))
    if len(groups) < 2 * count + 1:
        raise TextError(
            f"{len(groups):,} different {what} are too few to hold {count:,} out for validation and as many for testing"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    train, valid, test = (
        sorted(i for group in chosen for i in groups[group])
        for chosen in (order[2 * count :], order[:count], order[count : 2 * count])
    )
    return train, valid, test


def split_text(corpus: TextCorpus, share: float, seed: int) -> tuple[TextCorpus, TextCorpus, TextCorpus]:
    """Draw `share` of the documents each for validation and testing; see `hold_out`. Equal documents stay together.

    Raises ``TextError`` if there are too few documents for three sets.
    """
    try:
        sets = hold_out([tuple(document) for document in corpus.documents], share, seed, "documents")
    except TextError as error:
        raise TextError(f"{corpus.name}: {error}; give valid_text and test_text, or cut smaller documents") from None
    train, valid, test = (
        TextCorpus([corpus.documents[i] for i in indices], name)
        for indices, name in zip(sets, ("train", "valid", "test"), strict=True)
    )
    return train, valid, test
