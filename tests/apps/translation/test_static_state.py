"""Steps of fixed shapes: equal to those of the growing cache, eagerly and repeated as a CUDA graph would."""

import pytest
import torch

from fastformer.apps.translation import state
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.state import DecoderState, StaticDecoderState
from tests.support.fused_op import poisoned
from tests.support.recorded_steps import steps_of_both, taped
from tests.support.translation_task import BOS, random_model
from tests.support.uncached_search import RAGGED, sources

MODELS = {
    "pre-norm": {},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False, "embeddings": "shared"},
    "learned, no biases": {"positions": "learned", "bias": False, "output_bias": True, "embeddings": "separate"},
}


@pytest.fixture
def tape(monkeypatch):
    return taped(monkeypatch, state)


@pytest.fixture(params=["eager", "repeated"])
def mode(request):
    return request.getfixturevalue("tape") if request.param == "repeated" else None


@pytest.fixture
def small_cache(monkeypatch):
    """Caches that grow after 12 steps, and again."""
    monkeypatch.setattr(state, "_FIRST_CAPACITY", 12)


def assert_steps_equal(*given, tolerance=1e-12, **options):
    """Logits differ by the order in which attention adds up."""
    for static, growing in steps_of_both(*given, **options):
        torch.testing.assert_close(static, growing, atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", MODELS)
@torch.inference_mode()
def test_static_steps_are_the_growing_ones(variant, mode, small_cache):
    """Rows reordered, rows that leave twice, and a cache that grows twice on the way."""
    model = random_model(1, **MODELS[variant]).double()
    with poisoned():
        assert_steps_equal(model, RAGGED, 40, hypotheses=2, leave_at=(3, 14))
    if mode is not None:
        # One eager step at 0, 4 (rows left), 12, 15 (rows left) and 24; from 5 on too few steps remain before 12.
        assert (mode.warmed_up, mode.captured, mode.replayed) == (5, 4, 3 + 2 + 8 + 15)


@torch.inference_mode()
def test_one_graph_serves_all_steps_of_fixed_rows(tape):
    """Captured once, after one step; all others are repetitions, so nothing in them came from the host."""
    assert_steps_equal(random_model(2).double(), RAGGED, 40)
    assert (tape.warmed_up, tape.captured, tape.replayed) == (1, 1, 39)


@pytest.mark.parametrize("limit", [11, 17])
@torch.inference_mode()
def test_learned_positions_at_their_limit(limit, mode, small_cache):
    """Reached before the cache grows, and after; no cache holds more, as its capacity is looked up too."""
    model = random_model(3, positions="learned", max_positions=limit).double()
    assert_steps_equal(model, [3, 5], limit)
    state = StaticDecoderState(model, *sources([3]), longest=2)
    for _ in range(2):
        state.step(torch.tensor([BOS]))
    with pytest.raises(ValueError, match="longest must be at least the number of steps, not 2"):
        state.step(torch.tensor([BOS]))


RULES = [{}, {"min_length": 5, "no_repeat_ngram": 2}, {"max_length": 3}, {"max_ratio": 0.0, "max_extra": 70}]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("find", [greedy_search, beam_search])
def test_searches_find_the_same(find, rules, mode):
    model = random_model(6).double()
    source, lengths = sources(RAGGED)
    options = {"beam": 1 if find is greedy_search else 3, **rules}
    expected = find(model, source, lengths, SearchOptions(**options))
    found = find(model, source, lengths, SearchOptions(**options, cuda_graphs=True))
    assert_same_hypotheses(found, expected)
    if mode is not None and "max_length" not in rules:
        assert mode.replayed


def assert_same_hypotheses(found, expected):
    for one, two in zip(found, expected, strict=True):
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (one, two)), strict=True):
            assert a.ids == b.ids
            assert a.log_probability == pytest.approx(b.log_probability, abs=1e-5)
            assert a.score == pytest.approx(b.score, abs=1e-5)


def test_a_step_that_cannot_be_captured_is_eager_from_then_on(tape, monkeypatch):
    """As one that waits for the device: said once, with the reason, and the results are the same."""
    captures = []
    forward = DecoderState._logits
    capture = tape.capture

    def waiting(self, ids, positions, length):
        if int(ids[0]) < 0:
            raise AssertionError
        return forward(self, ids, positions, length)

    monkeypatch.setattr(DecoderState, "_logits", waiting)
    monkeypatch.setattr(tape, "capture", lambda step: captures.append(1) or capture(step))
    model = random_model(7).double()
    source, lengths = sources(RAGGED)
    expected = greedy_search(model, source, lengths)
    with pytest.warns(
        RuntimeWarning, match="goes on without CUDA graphs.*not permitted when stream is capturing"
    ) as said:
        found = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=True))
    assert_same_hypotheses(found, expected)
    assert len(captures) == len(said) == 1
