"""Greedy translation, d512 with 6+6 layers, 25 tokens a sentence, sources with the lengths of Multi30k.

Against T1's loop, which decodes the whole padded prefix of 200 positions again for every token, one sentence at a time,
whatever the batch. Both sides are given a fixed number of tokens, since random weights do not end a sentence.
"""

import pytest
import torch

from benchmarks.lengths import VOCABULARY, typical_batch
from benchmarks.race import Race, Side
from benchmarks.tutorials import FixedLengthTranslation
from fastformer.generate import SearchOptions, greedy_search
from fastformer.models import TranslationConfig, TranslationModel

TOKENS = 25
OPTIONS = SearchOptions(beam=1, max_ratio=0.0, max_extra=TOKENS, min_length=TOKENS)


@pytest.mark.parametrize(("batch", "goal", "rounds"), [(1, 15.0, 3), (128, 150.0, 3)])
def bench_greedy_search(race: Race, batch: int, goal: float, rounds: int) -> None:
    packed = typical_batch("random")[0].to(race.device)
    lengths = packed.source_lengths[:batch]
    source = packed.source[: int(lengths.sum())]
    model = _model().to(race.device).eval()
    competitor = FixedLengthTranslation(model).to(race.device).eval()

    # The first sentence, which T1 also translates, alone in its batch and in the whole of it.
    first = source[: int(lengths[0])].tolist()
    expected, log_probability = competitor.greedy(first, TOKENS)
    assert len(set(expected)) > 3, "a sentence of one repeated token proves little"
    found = greedy_search(model, source, lengths, OPTIONS)
    assert all(len(hypothesis.ids) == TOKENS for hypothesis in found)
    race.gate("translation", torch.tensor(found[0].ids), torch.tensor(expected), 0.0)
    race.gate("log probability", torch.tensor(found[0].log_probability), torch.tensor(log_probability), 1e-4)

    race(
        f"greedy search, batch {batch}, d512 6+6",
        Side("fastformer", lambda: greedy_search(model, source, lengths, OPTIONS), batch * TOKENS),
        Side("T1, whole prefix each step", lambda: competitor.greedy(first, TOKENS), TOKENS),
        rounds=rounds,
        goal=goal,
    )


@torch.no_grad()
def _model() -> TranslationModel:
    """Random weights whose translations vary with the source and from token to token.

    As drawn, tied embeddings make the model repeat its first token, which is still the loudest part of the hidden
    state; random signs in the last norm take that away at no cost.
    """
    model = TranslationModel(TranslationConfig(VOCABULARY, VOCABULARY))
    assert isinstance(model.decoder.norm, torch.nn.LayerNorm)
    model.decoder.norm.weight.copy_(torch.randint(0, 2, (model.config.d_model,)) * 2 - 1)
    return model
