"""Read and split corpora: sentence pairs, and documents of lines for language models.

Every line of a document ends with eos, as in the published token counts of WikiText. The boundaries of documents limit
the context of a model; they change neither the number of lines nor the number of tokens.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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
# Reasons in `ParallelCorpus.left_out`.
_EMPTY, _COPIES, _BEYOND = "with an empty side dropped", "copies of held-out pairs dropped", "more left out"


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: ``source[i]`` is translated by ``target[i]``; `left_out` counts other pairs by reason."""

    source: list[str]
    target: list[str]
    name: str = "corpus"
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise TextError(f"{self.name}: {len(self.source):,} source lines but {len(self.target):,} target lines")

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Sequence[int], name: str, left_out: Mapping[str, int] | None = None) -> "ParallelCorpus":
        """Return the pairs at `indices`, in that order, as a corpus with this name."""
        source, target = ([side[i] for i in indices] for side in (self.source, self.target))
        return ParallelCorpus(source, target, name, left_out or {})

    def __str__(self) -> str:
        notes = (f"{count:,} {reason}" for reason, count in self.left_out.items() if count)
        return ", ".join([f"{self.name}: {len(self):,} pairs", *notes])


def read_parallel(
    source_path: str | Path, target_path: str | Path, name: str | None = None, limit: int | None = None
) -> ParallelCorpus:
    """Read two line-aligned files; strip spaces, and drop and count pairs with a blank side.

    limit: the most pairs to return, the first ones; None: all. Further pairs are read, checked and counted only.

    Raises the errors of `read_lines`, and ``TextError`` if the line counts differ or no pair is left.
    """
    pairs: list[tuple[str, str]] = []
    source_lines = target_lines = beyond = 0
    for source, target in zip_longest(iterate_lines(source_path), iterate_lines(target_path)):
        source_lines, target_lines = source_lines + (source is not None), target_lines + (target is not None)
        pair = (source or "").strip(), (target or "").strip()
        if limit is not None and len(pairs) >= limit:
            beyond += 1
        elif all(pair):
            pairs.append(pair)
    if source_lines != target_lines:
        raise TextError(
            f"{source_path} has {source_lines:,} lines but {target_path} has {target_lines:,}: "
            "line i of one must translate line i of the other"
        )
    if not pairs:
        raise TextError(f"{source_path} and {target_path}: every pair of lines has an empty side")
    empty = source_lines - len(pairs) - beyond
    left_out = {_EMPTY: empty, _COPIES: 0, _BEYOND: beyond}  # in the order in which they are shown
    sources, targets = map(list, zip(*pairs, strict=True))
    return ParallelCorpus(sources, targets, name or Path(source_path).name, left_out)


def split(corpus: ParallelCorpus, validation: int, test: int, seed: int) -> tuple[ParallelCorpus, ...]:
    """Shuffle a corpus and split it into training, validation and test pairs with no pair in common.

    Held-out pairs are distinct, and copies of them are dropped from training (Europarl repeats formulas thousands of
    times). Raises ``TextError`` if no pair would be left for training.
    """
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
            f"after {validation:,} for validation and {test:,} for testing; give other files or sizes for these"
        )
    chosen = list(held_out.values())
    left_out = {**corpus.left_out, _COPIES: len(corpus) - len(train) - len(chosen)}
    training = corpus.take(train, "train", left_out)
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


def read_text(path: str | Path, document: DocumentKind | None = "line", name: str | None = None) -> TextCorpus:
    """Read a UTF-8 file, plain or compressed, as documents; spaces at both ends of a line are dropped.

    document: what a document is: each line, each article of WikiText, or the whole file; None: an article if the file
    has titles, else a line. Lines before the first title belong to the first article.

    Raises the errors of `read_lines`, ``TextError`` if the file holds no word, and ``ValueError`` for another kind of
    document, and for articles if no line is a title.
    """
    check_value("document", document, str | None, choices=DOCUMENT_KINDS)
    lines = [line.strip() for line in read_lines(path)]
    if not any(lines):
        raise TextError(f"{path}: holds no word")
    bounds = [0, len(lines)]
    if document in ("article", None):
        # A title stands between lines without words; inside an article a formula may look like one.
        around = ["", *lines, ""]
        titles = [i for i, line in enumerate(lines) if not around[i] + around[i + 2] and _TITLE.fullmatch(line)]
        if document and not titles:
            raise ValueError("document='article' needs titles such as '= Title =' on lines of their own; there is none")
        bounds = [0, *titles[1:], len(lines)]
        document = document if titles else "line"
    if document == "line":
        bounds = list(range(len(lines) + 1))
    return TextCorpus([lines[start:end] for start, end in pairwise(bounds)], name or Path(path).name)


def hold_out(keys: Sequence[Hashable], share: float, seed: int, name: str, what: str) -> list[list[int]]:
    """Draw `share` of the distinct items each for validation and testing, the rest for training.

    Items with equal keys go to the same set, so that no held-out item is seen in training. Returns the indices of each
    set, ascending. Raises ``TextError``, which calls the corpus `name` and the items `what`, if they are too few.
    """
    copies: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        copies.setdefault(key, []).append(index)
    groups = list(copies.values())
    count = max(1, round(share * len(groups)))
    if len(groups) < 2 * count + 1:
        raise TextError(
            f"{name}: {len(groups):,} different {what} are too few to hold {count:,} out for validation and as many "
            "for testing; give valid_text and test_text"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    sets = order[2 * count :], order[:count], order[count : 2 * count]
    return [sorted(i for group in chosen for i in groups[group]) for chosen in sets]


def split_text(corpus: TextCorpus, share: float, seed: int) -> tuple[TextCorpus, ...]:
    """Draw `share` of the documents each for validation and testing; see `hold_out`. Equal documents stay together."""
    sets = hold_out([tuple(document) for document in corpus.documents], share, seed, corpus.name, "documents")
    names = ("train", "valid", "test")
    return tuple(
        TextCorpus([corpus.documents[i] for i in indices], name) for indices, name in zip(sets, names, strict=True)
    )
