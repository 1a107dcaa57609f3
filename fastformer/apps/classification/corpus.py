"""Labelled text: one text a line, `label<TAB>text`, in UTF-8.

The label stands before the first tab, in Unicode's composed form (NFC). Lines without text are dropped and counted. The
labels of the training text are the classes, in alphabetical order, unless the settings name them.
"""

import random
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastformer.apps.text import TextError, Tokenizer, encode_source, english
from fastformer.apps.text.encoding import Sequences
from fastformer.apps.text.files import iterate_lines

_DIGITS = 6  # of the longest number
_to_nfc = partial(unicodedata.normalize, "NFC")


@dataclass(frozen=True)
class LabelledCorpus:
    """N texts, and the class of each: int64 `[N]`, an index into all `labels`, some of which may not occur."""

    texts: list[str]
    classes: NDArray[np.int64]
    labels: tuple[str, ...]
    name: str = "corpus"
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __str__(self) -> str:
        dropped = f", {self.dropped:,} without text dropped" if self.dropped else ""
        return f"{self.name}: {len(self):,} texts of {len(np.unique(self.classes)):,} labels{dropped}"

    def take(self, indices: Sequence[int], name: str) -> "LabelledCorpus":
        """Return the texts at `indices`, in that order, as a corpus called `name`."""
        chosen = np.array(indices, np.int64)
        return LabelledCorpus([self.texts[i] for i in indices], self.classes[chosen], self.labels, name)


def read_labelled(path: Path | str, labels: Sequence[str] | None = None, name: str | None = None) -> LabelledCorpus:
    """Read a labelled file, plain or compressed.

    Args:
        path: the file.
        labels: the classes; None: the labels in the file.
        name: the name of the corpus in messages; None: the file's name.

    Raises:
        FileNotFoundError: there is no such file.
        TextError: naming file and line: no tab, no label before it, or one that is not among `labels`; or there is no
            text, or only one label.
    """
    labelled: list[tuple[str, str]] = []
    known = {_to_nfc(label): label for label in labels or ()}
    for number, line in enumerate(iterate_lines(path), start=1):
        if not line.strip():
            continue
        label, tab, text = (field.strip() if field != "\t" else field for field in line.partition("\t"))
        if not tab:
            raise TextError(f"{path}:{number}: no tab; a line is a label, a tab and a text")
        if not label:
            raise TextError(f"{path}:{number}: no label before the tab")
        label = _to_nfc(label)
        if labels is not None and label not in known:
            known_labels = list_labels(labels)
            raise TextError(f"{path}:{number}: label {label!r} is not among those of training: {known_labels}")
        if text:
            labelled.append((known.get(label, label), text))
    if not labelled:
        raise TextError(f"{path}: holds no text with a label")
    classes = tuple(labels) if labels is not None else tuple(sorted({label for label, _ in labelled}))
    if len(classes) < 2:
        raise TextError(f"{path}: every text has the label {classes[0]!r}; a classifier needs two labels at least")
    return _corpus(labelled, classes, name or Path(path).name, dropped=number - len(labelled))


def list_labels(labels: Sequence[str]) -> str:
    """Return the labels for a message, at most ten of them."""
    return ", ".join(labels) if len(labels) <= 10 else f"{', '.join(labels[:10])} and {len(labels) - 10} more"


def number_texts(count: int) -> LabelledCorpus:
    """Generate English number words, labelled by how many digits the number has."""
    generator = random.Random(1)
    numbers = list(range(100))
    for digits in range(3, _DIGITS + 1):
        each = range(10 ** (digits - 1), 10**digits)
        numbers += generator.sample(each, min(count // 4, len(each) // 2))
    generator.shuffle(numbers)
    labels = tuple(str(digits) for digits in range(1, _DIGITS + 1))
    labelled = [(str(len(str(number))), english(number).replace("-", " ")) for number in numbers]
    return _corpus(labelled[:count], labels, "numbers", 0)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, max_length: int) -> tuple[Sequences, int]:
    """Encode texts as bos, for pooling "first", and tokens, at most `max_length`; count cut texts too."""
    sequences, cut = encode_source(texts, tokenizer, max_length)
    return sequences.with_special(first=tokenizer.bos_id), cut


def _corpus(labelled: Sequence[tuple[str, str]], labels: tuple[str, ...], name: str, dropped: int) -> LabelledCorpus:
    numbers = {label: number for number, label in enumerate(labels)}
    classes = np.array([numbers[label] for label, _ in labelled], np.int64)
    return LabelledCorpus([text for _, text in labelled], classes, labels, name, dropped)
