"""Translation models built from fastformer's layers."""

from fastformer.models.embeddings import Embedding, sinusoidal_positions
from fastformer.models.translation import TranslationConfig, TranslationModel, translation_loss

__all__ = ["Embedding", "TranslationConfig", "TranslationModel", "sinusoidal_positions", "translation_loss"]
