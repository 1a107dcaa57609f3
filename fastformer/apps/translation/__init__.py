"""Translation: the model, cached greedy and beam search, the translator, and training runs."""

from fastformer.apps.translation.beams import Hypothesis
from fastformer.apps.translation.model import TranslationConfig, TranslationModel, corpus_loss, translation_loss
from fastformer.apps.translation.run import DataConfig, TranslationRun, evaluate, load_translator, read_corpora
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.translator import Translation, Translator

__all__ = [
    "DataConfig",
    "Hypothesis",
    "SearchOptions",
    "Translation",
    "TranslationConfig",
    "TranslationModel",
    "TranslationRun",
    "Translator",
    "beam_search",
    "corpus_loss",
    "evaluate",
    "greedy_search",
    "load_translator",
    "read_corpora",
    "translation_loss",
]
