"""Text to labels with a trained classifier, and its scores: accuracy, and precision, recall and F1 of each label.

F1 is 2 PR / (P + R), and 0 for a label without a right prediction. Macro-F1 is the mean over labels that occur or were
predicted (van Rijsbergen 1979; Sokolova and Lapalme 2009).

Letters: N texts, C classes.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastformer.apps.classification.corpus import LabelledCorpus, encode_texts
from fastformer.apps.classification.model import SequenceClassifier
from fastformer.apps.models.common import check_tokenizer
from fastformer.apps.plots.attention_maps import AttentionMaps, attend_ids
from fastformer.apps.text import Sequences, Tokenizer
from fastformer.apps.text.files import check_texts
from fastformer.host.devices import device_of
from fastformer.settings import check_value

logger = logging.getLogger("fastformer")


@torch.no_grad()
def class_logits(model: SequenceClassifier, sequences: Sequences, batch_size: int = 64) -> Iterator[Tensor]:
    """Yield the logits of N sequences by batch, fp32 `[batch_size or fewer, C]` on the CPU; call `.eval()` first."""
    for start in range(0, len(sequences), batch_size):
        batch = sequences.take(np.arange(start, min(start + batch_size, len(sequences))))
        ids = torch.from_numpy(batch.ids.astype(np.int64)).to(device_of(model))
        yield model.logits(model(ids, torch.from_numpy(batch.lengths))).float().cpu()


class Classifier:
    """A classifier with its tokenizer and its labels.

    Args:
        model: put into evaluation mode.
        tokenizer: the tokenizer that the model was trained with.
        labels: the names of the C classes, in order.
        max_length: most tokens of a text, bos counted; longer ones are cut, with a warning.

    Raises:
        ValueError: tokenizer or labels do not belong to the model, or max_length exceeds the model's positions.
    """

    def __init__(self, model: SequenceClassifier, tokenizer: Tokenizer, labels: Sequence[str], max_length: int) -> None:
        config = model.config
        check_tokenizer("", tokenizer, config.vocabulary)
        if len(labels) != config.classes or len(set(labels)) != len(labels):
            raise ValueError(f"labels must be {config.classes} different ones, one for each class, not {len(labels)}")
        if config.longest is not None and max_length > config.longest:
            raise ValueError(f"max_length ({max_length}) is beyond max_positions ({config.longest})")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.labels, self.max_length = tuple(labels), max_length

    def probabilities(self, texts: Sequence[str], batch_size: int = 64) -> Tensor:
        """Compute the probability of each label for each text: fp32 `[N, C]`, on the CPU.

        Raises:
            TypeError: texts is one string.
            ValueError: batch_size is below 1.
            FloatingPointError: the model gives NaN.
        """
        batches = [logits.softmax(-1) for logits in self._logits(texts, batch_size)]
        return torch.cat([torch.empty(0, len(self.labels), device="cpu"), *batches])

    def classify(self, texts: Sequence[str], batch_size: int = 64) -> list[str]:
        """Return the most probable label of each text; arguments and errors as in `probabilities`."""
        return [self.labels[i] for logits in self._logits(texts, batch_size) for i in logits.argmax(-1).tolist()]

    def _logits(self, texts: Sequence[str], batch_size: int) -> Iterator[Tensor]:
        """Yield logits by batch; raise FloatingPointError for NaN, which argmax would take for the largest."""
        check_texts("texts", texts)
        check_value("batch_size", batch_size, int, at_least=1)
        model = self.model.eval()  # it may have been trained on since the last call
        for logits in class_logits(model, self.encode(texts), batch_size):
            if bool(logits.isnan().any()):
                raise FloatingPointError("the model's scores are not numbers: it has diverged")
            yield logits

    def encode(self, texts: Sequence[str]) -> Sequences:
        """Encode texts as the model reads them; warn of texts that are cut."""
        sequences, cut = encode_texts(texts, self.tokenizer, self.max_length)
        if cut:
            logger.warning("%d of %d texts were cut to %d tokens", cut, len(texts), self.max_length)
        return sequences

    def ranked(self, texts: Sequence[str], batch_size: int = 64) -> list[list[tuple[str, float]]]:
        """Return every label with its probability for each text, the most probable first; see `probabilities`."""
        rows = (row.sort(descending=True) for row in self.probabilities(texts, batch_size))
        return [[(self.labels[i], p) for p, i in zip(*map(Tensor.tolist, row), strict=True)] for row in rows]

    def attend(self, text: str) -> AttentionMaps:
        """Compute every attention weight of the model that reads a text; row t has the weights of token t."""
        sequences, _ = encode_texts([text], self.tokenizer, self.max_length)
        return attend_ids(self.model.eval(), sequences[0], self.tokenizer.pieces(sequences[0]), text)


@dataclass(frozen=True)
class Scores:
    """Predictions for labelled text, and their loss.

    Attributes:
        labels: the names of the C classes.
        true_classes: int64 `[N]`, the true class of each text.
        predicted: int64 `[N]`, the predicted class of each text.
        loss: mean cross entropy a text, in nats.
    """

    labels: tuple[str, ...]
    true_classes: NDArray[np.int64]
    predicted: NDArray[np.int64]
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of the texts with the right label."""
        return float(np.mean(self.true_classes == self.predicted))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the labels that occur or were predicted."""
        f1 = [f1 for _, _, _, f1 in self.each.values()]
        return float(np.mean([f1[i] for i in np.union1d(self.true_classes, self.predicted)]))

    @property
    def each(self) -> dict[str, tuple[int, float, float, float]]:
        """For every label, in order: how many texts have it, precision, recall and F1, 0 to 1."""
        correct = self.true_classes[self.true_classes == self.predicted]
        counts = (
            np.bincount(x, minlength=len(self.labels)).tolist() for x in (correct, self.true_classes, self.predicted)
        )
        return {  # 0, not 0 / 0, for a label that never occurs
            label: (texts, right / max(predicted, 1), right / max(texts, 1), 2 * right / max(texts + predicted, 1))
            for label, right, texts, predicted in zip(self.labels, *counts, strict=True)
        }

    def __str__(self) -> str:
        accuracy = f"accuracy {100 * self.accuracy:.2f} % of {len(self.true_classes):,} texts"
        return f"{accuracy}, macro-F1 {self.macro_f1:.4f}, loss {self.loss:.4f}"


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
