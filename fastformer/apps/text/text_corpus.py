"""Text for language models: documents, each of them one or more lines.

Every line ends with eos, as the published token counts of WikiText have it. Where a document begins decides what a
model may look back on; it changes neither the number of lines nor that of the tokens.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from fastformer.settings import check_value

from .files import TextError, read_lines

DocumentKind = Literal["line", "article", "file"]
DOCUMENT_KINDS = ("line", "article", "file")

# WikiText writes the title of an article as "= Title =" and its sections as "= = Section = =".
_TITLE = re.compile(r"= (?!= ).+ =")


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
    """Documents of the lines of a file: each line by itself, the articles of WikiText, or all lines as one.

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
    """The documents of a UTF-8 file, plain or compressed; spaces at both ends of a line are dropped.

    Raises as `read_lines` and `cut_lines` do, and ``TextError`` when the file holds no word.
    """
    lines = [line.strip() for line in read_lines(path)]
    if not any(lines):
        raise TextError(f"{path}: holds no word")
    return TextCorpus(cut_lines(lines, document), name or Path(path).name)


def hold_out(keys: Sequence[Hashable], share: float, seed: int, what: str) -> tuple[list[int], list[int], list[int]]:
    """Which of a text's parts are for training, validation and testing, drawn at random: their indices, ascending.

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
    """Training, validation and test documents, drawn at random; `share` of all for each of the two held-out parts.

    A document with the same lines as an earlier one goes where that one went. Raises ``TextError`` when there are too
    few documents for three parts.
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
