"""Decoding from CUDA graphs: a tape that repeats steps finds the same as steps that grow the cache."""

import pytest
import torch

from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import search, state
from fastformer.apps.translation.run import DataConfig, TranslationRun
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.state import DecoderState
from tests.support.fused_op import poisoned
from tests.support.recorded_steps import steps_of_both, taped
from tests.support.translation_task import BOS, random_model
from tests.support.uncached_search import RAGGED, sources

MODELS = {
    "pre-norm": {},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False, "embeddings": "shared"},
    "learned, no biases": {"positions": "learned", "max_positions": 40, "bias": False, "embeddings": "separate"},
}


@pytest.fixture
def tape(monkeypatch):
    return taped(monkeypatch, state)


@pytest.mark.parametrize("variant", MODELS)
@torch.inference_mode()
def test_replayed_steps_are_the_growing_ones(variant, tape):
    """Rows are reordered, and leave twice; the cache holds as many positions as the model can."""
    model = random_model(1, **MODELS[variant]).double()
    with poisoned():
        for static, growing in steps_of_both(model, RAGGED, 40, hypotheses=2, leave_at=(3, 14)):
            torch.testing.assert_close(static, growing, atol=1e-12, rtol=0)  # another order of sums
    # An eager step at 0, and at 4 and 15 (after rows left), each followed by one graph.
    assert (tape.warmed_up, tape.captured, tape.replayed) == (3, 3, 40 - 3)


@torch.inference_mode()
def test_no_more_steps_than_stated_and_no_graphs_without_a_gpu(tape, monkeypatch):
    arguments = random_model(3).double(), *sources([3])
    decoder = DecoderState(*arguments, longest=2)
    for _ in range(2):
        decoder.step(torch.tensor([BOS]))
    with pytest.raises(ValueError, match="longest must be at least the number of steps, not 2"):
        decoder.step(torch.tensor([BOS]))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cuda_graphs has an effect only with a CUDA device, not with a cpu"):
        greedy_search(*arguments, SearchOptions(cuda_graphs=True))


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
    """Also where sentences that are done leave, and the step is captured again."""
    monkeypatch.setattr(search, "_IDLE_ROWS", 3)
    arguments = random_model(6).double(), *sources(RAGGED)
    expected = find(*arguments, SearchOptions(beam=3, **rules))
    actual = find(*arguments, SearchOptions(beam=3, **rules, cuda_graphs=True))
    assert_same_hypotheses(actual, expected)
    assert tape.replayed
    assert tape.captured > 1 or rules


def test_by_default_searches_replay_graphs_where_they_apply(tape, monkeypatch):
    """On a device with graphs, if the cache takes at most a tenth of its memory, and without hooks."""
    model, (source, lengths) = random_model(6).double(), sources(RAGGED)
    longest = int(SearchOptions().limits(lengths, model.config).max())
    cache = DecoderState(model, source, lengths, 4, longest).cache
    enough = 10 * sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    memory = enough
    monkeypatch.setattr(search, "memory_for_graphs", lambda device: memory)

    def replays(**options):
        before = tape.replayed
        beam_search(model, source, lengths, SearchOptions(**options))
        return tape.replayed > before

    assert replays()
    assert not replays(cuda_graphs=False)
    memory = enough - 1
    assert not replays()
    assert replays(cuda_graphs=True)
    memory = 0  # no graphs
    assert not replays()
    memory = enough
    with model.output.register_forward_hook(lambda *_: None):
        assert not replays()


@pytest.mark.parametrize("graphs", [None, False])
def test_validations_replay_graphs_unless_training_may_not(graphs, tape, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "memory_for_graphs", lambda device: 1 << 40)
    data = DataConfig(train_size=80, valid_size=10, test_size=10, vocabulary=70, bleu_sentences=2)
    shape = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}
    run = TranslationRun.create(tmp_path / "run", data, shape, TrainConfig(steps=1, cuda_graphs=graphs))
    with torch.no_grad():
        run.validation()(run.new_model())
    assert (tape.replayed > 0) == (graphs is None)


def test_a_step_that_cannot_be_captured_is_eager_from_then_on(tape, monkeypatch):
    """As one that waits for the device: one warning with the reason, and the results are the same."""
    captures = []
    forward = DecoderState._logits
    capture = tape.capture

    def waiting(self, ids, positions, length):
        assert int(ids[0]) >= 0
        return forward(self, ids, positions, length)

    monkeypatch.setattr(DecoderState, "_logits", waiting)
    monkeypatch.setattr(tape, "capture", lambda step: captures.append(1) or capture(step))
    arguments = random_model(7).double(), *sources(RAGGED)
    expected = greedy_search(*arguments)
    with pytest.warns(
        RuntimeWarning, match="goes on without CUDA graphs.*not permitted when stream is capturing"
    ) as warnings:
        actual = greedy_search(*arguments, SearchOptions(cuda_graphs=True))
    assert_same_hypotheses(actual, expected)
    assert len(captures) == len(warnings) == 1
