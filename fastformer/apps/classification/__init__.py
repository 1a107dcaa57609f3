"""Classifiers of sequences and of tokens."""

from fastformer.apps.classification.model import (
    ClassifierConfig,
    SequenceClassifier,
    TokenClassifier,
    sequence_classification_loss,
    token_classification_loss,
)

__all__ = [
    "ClassifierConfig",
    "SequenceClassifier",
    "TokenClassifier",
    "sequence_classification_loss",
    "token_classification_loss",
]
