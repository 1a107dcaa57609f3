"""Translation and language models built from fastformer's layers."""

from fastformer.models.embeddings import Embedding, sinusoidal_positions
from fastformer.models.language import LanguageConfig, LanguageModel, language_model_loss
from fastformer.models.translation import TranslationConfig, TranslationModel, translation_loss

__all__ = [
    "Embedding",
    "LanguageConfig",
    "LanguageModel",
    "TranslationConfig",
    "TranslationModel",
    "language_model_loss",
    "sinusoidal_positions",
    "translation_loss",
]
