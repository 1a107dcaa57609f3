"""Language models: the model, sampling with a cache, the text generator, perplexity, and training runs."""

from fastformer.apps.language.evaluation import Perplexity, perplexity
from fastformer.apps.language.model import CLASSICAL, LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.run import (
    LanguageDataConfig,
    LanguageRun,
    LanguageTrainConfig,
    build_tokenizer,
    evaluate_text,
    load_generator,
    read_text_corpora,
)
from fastformer.apps.language.sampling import LanguageState, RandomStreams, SamplingOptions, choose_ids, sample
from fastformer.apps.language.text_generator import TextGenerator, attend_text
from fastformer.apps.runs.application import complete_run

__all__ = [
    "CLASSICAL",
    "LanguageConfig",
    "LanguageDataConfig",
    "LanguageModel",
    "LanguageRun",
    "LanguageState",
    "LanguageTrainConfig",
    "Perplexity",
    "RandomStreams",
    "SamplingOptions",
    "TextGenerator",
    "attend_text",
    "build_tokenizer",
    "choose_ids",
    "complete_run",
    "evaluate_text",
    "language_model_loss",
    "load_generator",
    "perplexity",
    "read_text_corpora",
    "sample",
]
