"""Loops of decoding replay CUDA graphs where they apply: a tape that repeats steps finds what growing caches find."""

import gc
import weakref

import pytest
import torch

from fastformer.apps.language.sampling import LanguageState, SamplingOptions, sample
from fastformer.apps.models import decoding
from fastformer.apps.models.decoding import recorder_of
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.train import TrainConfig
from fastformer.apps.translation import search
from fastformer.apps.translation.run import DataConfig, TranslationRun
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.host.cuda_graphs import Recorded, ReplayedStep
from tests.apps.language.test_sampling import PROMPTS, eager_model, texts
from tests.apps.language.test_window import VARIANTS, random_tokens
from tests.support import language_task, translation_task
from tests.support.fused_op import poisoned
from tests.support.recorded_steps import steps_of_both, taped
from tests.support.uncached_search import RAGGED, cached_decoder, sources

LENGTH = 9


@pytest.fixture
def tape(monkeypatch):
    """Let loops of decoding replay a tape on a CPU, where they may use CUDA graphs."""
    return taped(monkeypatch, decoding)


def language(tape):
    model = language_task.random_model(3).double()
    return model, model.config.layers, LanguageState(model, [[2, 5], [2]], LENGTH, tape).cache, 2


def translation(tape):
    model = translation_task.random_model(6).double()
    cache, _ = cached_decoder(model, *sources(RAGGED), 4, LENGTH)
    return model, model.config.decoder_layers, cache, 4 * len(RAGGED)


@pytest.mark.parametrize("make", [language, translation])
@torch.inference_mode()
def test_by_default_where_they_apply(make, tape, monkeypatch):
    """If the cache takes at most a tenth of the device's memory, and without hooks."""
    model, layers, cache, rows = make(tape)
    memory = 10 * sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    for size, cuda_graphs, applies in (
        (memory, None, True),
        (memory, False, False),
        (memory - 1, None, False),
        (memory - 1, True, True),
        (0, None, False),  # a device without graphs
    ):
        monkeypatch.setattr(decoding, "memory_for_graphs", lambda device, size=size: size)
        assert (recorder_of(model, layers, rows * LENGTH, cuda_graphs) is tape) == applies
    monkeypatch.setattr(decoding, "memory_for_graphs", lambda device: memory)
    with model.output.register_forward_hook(lambda *_: None):
        assert recorder_of(model, layers, rows * LENGTH, None) is None


def test_an_error_without_a_gpu():
    for run in (
        lambda: greedy_search(translation_task.random_model(3), *sources([3]), SearchOptions(cuda_graphs=True)),
        lambda: list(
            sample(language_task.random_model(3), [[2]], SamplingOptions(cuda_graphs=True), 6, RandomStreams(0))
        ),
    ):
        with pytest.raises(ValueError, match="cuda_graphs has an effect only with a CUDA device, not with a cpu"):
            run()


def test_a_graph_keeps_the_buffers_that_it_reads(tape, monkeypatch):
    """A table of positions that grows is replaced; a graph would read the memory of the table before."""
    monkeypatch.setattr(tape, "capture", lambda step: Recorded(step, None))  # the tape itself keeps what it reads
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(3))
    step = ReplayedStep(tape, model, lambda: None, "decoding")
    step()
    step()
    table = weakref.ref(model.table)
    model.table = torch.zeros(6)
    assert table() is not None
    step.reset()
    assert table() is None


# Translation


MODELS = {
    "pre-norm": {},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False, "embeddings": "shared"},
    "learned, no biases": {"positions": "learned", "max_positions": 40, "bias": False, "embeddings": "separate"},
}


@pytest.mark.parametrize("variant", MODELS)
@torch.inference_mode()
def test_replayed_steps_of_translation_are_the_growing_ones(variant, tape):
    """Rows are reordered, and leave twice; the cache holds as many positions as the model can."""
    model = translation_task.random_model(1, **MODELS[variant]).double()
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
    arguments = translation_task.random_model(6).double(), *sources(RAGGED)
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
    arguments = translation_task.random_model(7).double(), *sources(RAGGED)
    expected = greedy_search(*arguments)
    with pytest.warns(
        RuntimeWarning, match="goes on without CUDA graphs.*not permitted when stream is capturing"
    ) as warnings:
        actual = greedy_search(*arguments, SearchOptions(cuda_graphs=True))
    assert_same_hypotheses(actual, expected)
    assert len(captures) == len(warnings) == 1


# Generation of text


POSITIONS = {name: {"positions": name} for name in ("rotary", "alibi", "relative", "none")}


@pytest.mark.parametrize("variant", VARIANTS | POSITIONS)
@torch.inference_mode()
def test_replayed_steps_of_generation_are_the_growing_ones(variant, tape):
    """Rows slide at different times, and one leaves; the graph of before a slide serves after it."""
    model = language_task.random_model(1, **(VARIANTS | POSITIONS)[variant]).double()
    fixed, growing = LanguageState(model, PROMPTS, 8, tape), LanguageState(model, PROMPTS, 8)
    rows = torch.arange(4)
    for t, ids in enumerate(random_tokens(4, 25)):
        if t == 11:
            rows = torch.tensor([0, 2, 3])
            for state in (fixed, growing):
                state.keep(rows)
        torch.testing.assert_close(fixed.step(ids[rows]), growing.step(ids[rows]), atol=1e-12, rtol=0)
    assert (tape.warmed_up, tape.captured, tape.replayed) == (2, 2, 25 - 2)


def test_a_state_is_freed_at_once(tape):
    """Its cache and graph would fill the memory of a device, which Python's garbage collector does not look at."""
    with torch.inference_mode():
        state = LanguageState(language_task.random_model(1), PROMPTS, 8, tape)
    with torch.no_grad():
        for ids in random_tokens(4, 3):
            state.step(ids)
    cache = weakref.ref(state.cache)
    gc.disable()
    try:
        del state
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"temperature": 0, "min_new_tokens": 3}, {"stop_at_eos": False}], ids=str)
@pytest.mark.parametrize("idle_rows", [3, 10**6])
def test_generated_texts_are_the_same(options, idle_rows, tape, monkeypatch):
    """Also after texts have ended, whose rows leave once they have cost as much as a new graph, or never."""
    monkeypatch.setattr(decoding, "IDLE_ROWS", idle_rows)
    model = eager_model(1.0).double()
    options = SamplingOptions(seed=1, max_new_tokens=30, **options)
    expected = texts(model, PROMPTS * 2, options)
    assert not tape.replayed
    monkeypatch.setattr(decoding, "memory_for_graphs", lambda device: 1 << 40)
    assert texts(model, PROMPTS * 2, options) == expected
    ends = len({len(text) for text in expected}) > 1
    assert tape.replayed
    assert (tape.captured > 1) == (ends and idle_rows == 3)
