"""Language models: the model, sampling with a cache, the text generator, perplexity, and training runs."""

from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.run import (
    LanguageDataConfig,
    LanguageRun,
    LanguageTrainConfig,
    Perplexity,
    evaluate_text,
    load_generator,
    perplexity,
)
from fastformer.apps.language.sampling import SamplingOptions, TextGenerator

__all__ = [
    "CLASSICAL",
    "LanguageConfig",
    "LanguageDataConfig",
    "LanguageModel",
    "LanguageRun",
    "LanguageTrainConfig",
    "Perplexity",
    "SamplingOptions",
    "TextGenerator",
    "evaluate_text",
    "language_model_loss",
    "load_generator",
    "perplexity",
]
