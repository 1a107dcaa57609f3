"""Translation models, language models and classifiers built from fastformer's layers."""

from fastformer.models.classification import (
    ClassifierConfig,
    SequenceClassifier,
    TokenClassifier,
    sequence_classification_loss,
    token_classification_loss,
)
from fastformer.models.embeddings import Embedding, sinusoidal_positions
from fastformer.models.language import LanguageConfig, LanguageModel, language_model_loss
from fastformer.models.translation import TranslationConfig, TranslationModel, translation_loss

__all__ = [
    "ClassifierConfig",
    "Embedding",
    "LanguageConfig",
    "LanguageModel",
    "SequenceClassifier",
    "TokenClassifier",
    "TranslationConfig",
    "TranslationModel",
    "language_model_loss",
    "sequence_classification_loss",
    "sinusoidal_positions",
    "token_classification_loss",
    "translation_loss",
]
