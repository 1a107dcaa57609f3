"""Classifiers of sequences and of tokens; training runs that label texts, and functions that use them."""

from fastformer.apps.classification.classifier import Classifier, Scores
from fastformer.apps.classification.corpus import LabelledCorpus, encode_texts, read_labelled
from fastformer.apps.classification.model import (
    ClassifierConfig,
    EncoderConfig,
    SequenceClassifier,
    TextEncoder,
    TokenClassifier,
    sequence_classification_loss,
    token_classification_loss,
)
from fastformer.apps.classification.run import (
    ClassificationDataConfig,
    ClassificationRun,
    ClassificationTrainConfig,
    evaluate,
    load_classifier,
)

__all__ = [
    "ClassificationDataConfig",
    "ClassificationRun",
    "ClassificationTrainConfig",
    "Classifier",
    "ClassifierConfig",
    "EncoderConfig",
    "LabelledCorpus",
    "Scores",
    "SequenceClassifier",
    "TextEncoder",
    "TokenClassifier",
    "encode_texts",
    "evaluate",
    "load_classifier",
    "read_labelled",
    "sequence_classification_loss",
    "token_classification_loss",
]
