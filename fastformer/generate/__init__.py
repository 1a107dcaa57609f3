"""Decoding: greedy and beam search with a cache, and the translator around them."""

from fastformer.generate.cache import DecoderState
from fastformer.generate.search import Hypothesis, SearchOptions, beam_search, greedy_search
from fastformer.generate.translator import Translation, Translator

__all__ = [
    "DecoderState",
    "Hypothesis",
    "SearchOptions",
    "Translation",
    "Translator",
    "beam_search",
    "greedy_search",
]
