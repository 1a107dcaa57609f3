"""Labelled text: one text a line, `label<TAB>text`, in UTF-8.

The label stands before the first tab, in Unicode's composed form (NFC). Lines without text are dropped and counted. The
labels of the training text are the classes, in alphabetical order, unless the settings name them.
"""

import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastformer.apps.text import TextError, Tokenizer, encode_source, english, hold_out
from fastformer.apps.text.encoding import Sequences
from fastformer.apps.text.files import iterate_lines

Split = Literal["train", "valid", "test"]
_HELD_OUT: tuple[Split, ...] = ("valid", "test")
_SHOWN = 10  # labels in a message
_DIGITS = 6  # of the longest number


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
        """The texts at `indices`, in that order, under a name of their own."""
        chosen = np.array(indices, np.int64)
        return LabelledCorpus([self.texts[i] for i in indices], self.classes[chosen], self.labels, name)


def read_labelled(path: Path | str, labels: Sequence[str] | None = None, name: str | None = None) -> LabelledCorpus:
    """Read a labelled file, plain or compressed.

    Args:
        path: of the file.
        labels: the classes; None: those of the file.
        name: for messages.

    Raises:
        FileNotFoundError: there is no such file.
        TextError: naming file and line: no tab, no label before it, or one that is not among `labels`; or there is no
            text, or only one label.
    """
    found: list[tuple[str, str]] = []
    known = {} if labels is None else {_composed(label): label for label in labels} | {label: label for label in labels}
    dropped = 0
    for number, line in enumerate(iterate_lines(path), start=1):
        if not line.strip():
            dropped += 1
            continue
        label, tab, text = (part.strip() if part != "\t" else part for part in line.partition("\t"))
        if not tab:
            raise TextError(f"{path}:{number}: no tab; a line is a label, a tab and a text")
        if not label:
            raise TextError(f"{path}:{number}: no label before the tab")
        composed = _composed(label)
        if labels is None:
            label = composed
        elif label in known or composed in known:  # older runs have labels in other forms
            label = known[label if label in known else composed]
        else:
            raise TextError(f"{path}:{number}: label {label!r} is not among those of training: {_listed(labels)}")
        if text:
            found.append((label, text))
        else:
            dropped += 1
    if not found:
        raise TextError(f"{path}: holds no text with a label")
    classes = tuple(labels) if labels is not None else tuple(sorted({label for label, _ in found}))
    if len(classes) < 2:
        raise TextError(f"{path}: every text has the label {classes[0]!r}; a classifier needs two labels at least")
    return _corpus(found, classes, name or Path(path).name, dropped)


def number_texts(count: int, seed: int = 1) -> LabelledCorpus:
    """Generate English number words, labelled by how many digits the number has."""
    generator = random.Random(seed)
    numbers = list(range(100))
    for digits in range(3, _DIGITS + 1):
        each = range(10 ** (digits - 1), 10**digits)
        numbers += generator.sample(each, min(count // 4, len(each) // 2))
    generator.shuffle(numbers)
    labels = tuple(str(digits) for digits in range(1, _DIGITS + 1))
    found = [(str(len(str(number))), english(number).replace("-", " ")) for number in numbers]
    return _corpus(found[:count], labels, "numbers", 0)


def split_labelled(
    corpus: LabelledCorpus, share: float, given: Mapping[Split, LabelledCorpus] | None = None
) -> dict[Split, LabelledCorpus]:
    """Split a corpus at random into training, validation and test texts, `share` for each of the last two.

    Parts that are `given` stay as they are; their share is for training. Raises TextError for too few texts.
    """
    try:
        train, *held = hold_out(corpus.texts, share, 1, "texts")
    except TextError as error:
        raise TextError(f"{corpus.name}: {error}; give valid_text and test_text") from None
    parts: dict[Split, LabelledCorpus] = {"train": corpus}
    for name, indices in zip(_HELD_OUT, held, strict=True):
        if given is not None and name in given:
            parts[name] = given[name]
            train = sorted(train + indices)
        else:
            parts[name] = corpus.take(indices, name)
    return {**parts, "train": replace(corpus.take(train, "train"), dropped=corpus.dropped)}


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, max_length: int) -> tuple[Sequences, int]:
    """Encode texts as bos, for pooling "first", and tokens, at most `max_length`; return also how many were cut."""
    sequences, cut = encode_source(texts, tokenizer, max_length)
    ids, lengths = sequences.with_special(first=tokenizer.bos_id)
    return Sequences(ids.astype(np.int32), np.concatenate([[0], np.cumsum(lengths)])), cut


def _corpus(found: Sequence[tuple[str, str]], labels: tuple[str, ...], name: str, dropped: int) -> LabelledCorpus:
    numbers = {label: number for number, label in enumerate(labels)}
    classes = np.array([numbers[label] for label, _ in found], np.int64)
    return LabelledCorpus([text for _, text in found], classes, labels, name, dropped)


def _composed(label: str) -> str:
    return unicodedata.normalize("NFC", label)


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more
