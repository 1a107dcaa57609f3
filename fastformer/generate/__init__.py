"""Decoding: search with a cache and the translator around it; sampling and the text generator around that.

Beside them, where a model looks: the weights of its attention for a text.
"""

from fastformer.generate.attention_maps import AttentionMaps, SentenceAttention, attend, attend_ids, attend_text
from fastformer.generate.cache import DecoderState
from fastformer.generate.language_cache import LanguageState
from fastformer.generate.sampling import SamplingOptions, choose_ids, random_streams, sample
from fastformer.generate.search import Hypothesis, SearchOptions, beam_search, greedy_search
from fastformer.generate.text_generator import TextGenerator
from fastformer.generate.translator import Translation, Translator

__all__ = [
    "AttentionMaps",
    "DecoderState",
    "Hypothesis",
    "LanguageState",
    "SamplingOptions",
    "SearchOptions",
    "SentenceAttention",
    "TextGenerator",
    "Translation",
    "Translator",
    "attend",
    "attend_ids",
    "attend_text",
    "beam_search",
    "choose_ids",
    "greedy_search",
    "random_streams",
    "sample",
]
