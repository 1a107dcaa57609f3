"""Scores of classifiers: cross entropy, accuracy, and precision, recall and F1 of each label.

F1 is 2 PR / (P + R), and 0 for a label without a right prediction. Macro-F1 is the mean over labels that occur or were
predicted (van Rijsbergen 1979; Sokolova and Lapalme 2009).

Letters: N texts, C classes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastformer.apps.classification.classifier import class_logits
from fastformer.apps.classification.corpus import LabelledCorpus, encode_texts
from fastformer.apps.classification.model import SequenceClassifier
from fastformer.apps.text import Tokenizer


@dataclass(frozen=True)
class LabelScore:
    """One label: how many texts have it, and precision, recall and F1, 0 to 1."""

    label: str
    texts: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Scores:
    """Predictions for labelled text, and their loss.

    Attributes:
        labels: the names of the C classes.
        wanted: int64 `[N]`, the true class of each text.
        predicted: int64 `[N]`, the predicted class of each text.
        loss: mean cross entropy a text, in nats.
    """

    labels: tuple[str, ...]
    wanted: NDArray[np.int64]
    predicted: NDArray[np.int64]
    loss: float

    @property
    def counts(self) -> NDArray[np.int64]:
        """Count the texts of each label (row) by predicted label (column): int64 `[C, C]`."""
        size = len(self.labels)
        return np.bincount(self.wanted * size + self.predicted, minlength=size * size).reshape(size, size)

    @property
    def accuracy(self) -> float:
        """Share of the texts with the right label."""
        return float(np.mean(self.wanted == self.predicted))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the labels that occur or were predicted."""
        seen = np.union1d(self.wanted, self.predicted)
        each = self.each
        return float(np.mean([each[i].f1 for i in seen]))

    @property
    def each(self) -> list[LabelScore]:
        """The scores of every label, in order."""
        correct = self.wanted[self.wanted == self.predicted]
        right, texts, predicted = (
            np.bincount(x, minlength=len(self.labels)) for x in (correct, self.wanted, self.predicted)
        )
        # F1 is 2 right / (texts + predicted); what never occurs is 0, not 0 / 0.
        precision, recall, f1 = (
            right * factor / np.maximum(count, 1)
            for factor, count in ((1, predicted), (1, texts), (2, texts + predicted))
        )
        columns = (texts.tolist(), precision.tolist(), recall.tolist(), f1.tolist())
        return [LabelScore(*row) for row in zip(self.labels, *columns, strict=True)]

    def __str__(self) -> str:
        accuracy = f"accuracy {100 * self.accuracy:.2f} % of {len(self.wanted):,} texts"
        return f"{accuracy}, macro-F1 {self.macro_f1:.4f}, loss {self.loss:.4f}"


def score(model: SequenceClassifier, corpus: LabelledCorpus, tokenizer: Tokenizer, max_length: int) -> Scores:
    """Predict the label of every text of a corpus; call `.eval()` first."""
    return score_logits(class_logits(model, encode_texts(corpus.texts, tokenizer, max_length)[0]), corpus)


def score_logits(batches: Iterable[Tensor], corpus: LabelledCorpus) -> Scores:
    """Score logits, batch by batch `[.., C]`, against a corpus; raise ValueError for a corpus without text."""
    if not len(corpus):
        raise ValueError(f"{corpus.name} must hold at least one text to score")
    target = torch.from_numpy(corpus.classes)
    predicted: list[int] = []
    nats = 0.0
    for logits in batches:
        rows = slice(len(predicted), len(predicted) + len(logits))
        predicted += logits.argmax(-1).tolist()
        nats += float(F.cross_entropy(logits, target[rows], reduction="sum"))
    return Scores(corpus.labels, corpus.classes, np.array(predicted, np.int64), nats / len(target))
