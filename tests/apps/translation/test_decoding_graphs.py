"""Decoding from CUDA graphs: a tape that repeats steps finds the same as steps that grow the cache."""

import pytest
import torch

from fastformer.apps.models import decoding
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import search
from fastformer.apps.translation.run import DataConfig, TranslationRun
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from tests.support.fused_op import poisoned
from tests.support.recorded_steps import steps_of_both
from tests.support.translation_task import random_model
from tests.support.uncached_search import RAGGED, sources

MODELS = {
    "pre-norm": {},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False, "embeddings": "shared"},
    "learned, no biases": {"positions": "learned", "max_positions": 40, "bias": False, "embeddings": "separate"},
}


@pytest.mark.parametrize("variant", MODELS)
@torch.inference_mode()
def test_replayed_steps_are_the_growing_ones(variant, tape):
    """Rows are reordered, and leave twice; the cache holds as many positions as the model can."""
    model = random_model(1, **MODELS[variant]).double()
    with poisoned():
        for static, growing in steps_of_both(model, RAGGED, 40, tape, hypotheses=2, leave_at=(3, 14)):
            torch.testing.assert_close(static, growing, atol=1e-12, rtol=0)  # another order of sums
    # An eager step at 0, and at 4 and 15 (after rows left), each followed by one graph.
    assert (tape.warmed_up, tape.captured, tape.replayed) == (3, 3, 40 - 3)


RULES = [{}, {"min_length": 5, "no_repeat_ngram": 2}, {"max_ratio": 0.0, "max_extra": 70}]


def assert_same_hypotheses(actual, expected):
    for one, two in zip(actual, expected, strict=True):
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (one, two)), strict=True):
            assert a.ids == b.ids
            assert a.log_probability == pytest.approx(b.log_probability, abs=1e-5)
            assert a.score == pytest.approx(b.score, abs=1e-5)


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("find", [greedy_search, beam_search])
def test_searches_find_the_same(find, rules, tape, monkeypatch):
    """Also where sentences that are done leave or the cache of a beam grows, and the step is captured again."""
    monkeypatch.setattr(decoding, "IDLE_ROWS", 3)
    monkeypatch.setattr(search, "_FIRST_CAPACITY", 9)
    arguments = random_model(6).double(), *sources(RAGGED)
    expected = find(*arguments, SearchOptions(beam=3, **rules))
    actual = find(*arguments, SearchOptions(beam=3, **rules, cuda_graphs=True))
    assert_same_hypotheses(actual, expected)
    assert tape.replayed
    assert tape.captured > 1 or (rules and find is greedy_search)


@pytest.mark.parametrize("graphs", [None, False])
def test_validations_replay_graphs_unless_training_may_not(graphs, tape, monkeypatch, tmp_path):
    monkeypatch.setattr(decoding, "memory_for_graphs", lambda device: 1 << 40)
    data = DataConfig(train_size=80, valid_size=10, test_size=10, vocabulary=70, bleu_sentences=2)
    shape = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}
    run = TranslationRun.create(tmp_path / "run", data, shape, TrainConfig(steps=1, cuda_graphs=graphs))
    with torch.no_grad():
        run.validation()(run.new_model())
    assert (tape.replayed > 0) == (graphs is None)


def test_a_step_that_cannot_be_captured_is_eager_from_then_on(tape, monkeypatch):
    """As one that waits for the device: one warning with the reason, and the results are the same."""
    captures = []
    forward, capture = search.next_logits, tape.capture

    def waiting(model, embedding, cache, ids):
        assert int(ids[0]) >= 0
        return forward(model, embedding, cache, ids)

    monkeypatch.setattr(search, "next_logits", waiting)
    monkeypatch.setattr(tape, "capture", lambda step: captures.append(1) or capture(step))
    arguments = random_model(7).double(), *sources(RAGGED)
    expected = greedy_search(*arguments)
    with pytest.warns(
        RuntimeWarning, match="goes on without CUDA graphs.*not permitted when stream is capturing"
    ) as warnings:
        actual = greedy_search(*arguments, SearchOptions(cuda_graphs=True))
    assert_same_hypotheses(actual, expected)
    assert len(captures) == len(warnings) == 1
