"""Text to labels with a trained classifier.

Letters: N texts, C classes.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fastformer.apps.classification.corpus import encode_texts
from fastformer.apps.classification.model import SequenceClassifier
from fastformer.apps.models.common import check_tokenizer, layouts_of
from fastformer.apps.plots.attention_maps import AttentionMaps, attend_ids
from fastformer.apps.text import LabelledBatches, Sequences, Tokenizer, check_texts
from fastformer.host.devices import device_of
from fastformer.settings import check_value

logger = logging.getLogger("fastformer")


@torch.no_grad()
def class_logits(model: SequenceClassifier, sequences: Sequences, batch_size: int = 64) -> Iterator[Tensor]:
    """Yield the logits of N sequences by batch, fp32 `[batch_size or fewer, C]` on the CPU; call `.eval()` first."""
    if not len(sequences):
        return
    device = device_of(model)
    labels = np.zeros(len(sequences), np.int64)  # unused
    for each in LabelledBatches(sequences, labels, size=batch_size, shuffle=False).epoch(0):
        batch = each.to(device)
        (layout,) = layouts_of(batch, "lengths")
        yield model.logits(model(batch.ids, layout)).float().cpu()


def _checked(logits: Tensor) -> Tensor:
    """Return logits; raise FloatingPointError for NaN, which argmax would take for the largest."""
    if bool(logits.isnan().any()):
        raise FloatingPointError("the model's scores are not numbers: it has diverged")
    return logits


class Classifier:
    """A classifier with its tokenizer and its labels, in evaluation mode.

    Args:
        model: a trained model.
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
        check_texts("texts", texts)
        check_value("batch_size", batch_size, int, at_least=1)
        sequences, cut = encode_texts(texts, self.tokenizer, self.max_length)
        if cut:
            logger.warning("%d of %d texts were cut to %d tokens", cut, len(texts), self.max_length)
        return map(_checked, class_logits(self.model, sequences, batch_size))

    def attend(self, text: str) -> AttentionMaps:
        """Compute every attention weight of the model that reads a text; row t has the weights of token t."""
        sequences, _ = encode_texts([text], self.tokenizer, self.max_length)
        return attend_ids(self.model, sequences[0], self.tokenizer.pieces(sequences[0]), text)
