"""Language models: the model, sampling with a cache, the text generator, perplexity, and training runs."""

from fastformer.apps.language.evaluation import Perplexity, perplexity
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.run import (
    LanguageDataConfig,
    LanguageRun,
    LanguageTrainConfig,
    evaluate_text,
    load_generator,
)
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.language.text_generator import TextGenerator, attend_text

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
    "attend_text",
    "evaluate_text",
    "language_model_loss",
    "load_generator",
    "perplexity",
]
