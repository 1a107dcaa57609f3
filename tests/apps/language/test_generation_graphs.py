"""Generation from CUDA graphs: a tape that repeats steps writes the same texts as steps that grow the cache."""

import gc
import weakref

import pytest
import torch

from fastformer.apps.language.sampling import LanguageState, SamplingOptions
from fastformer.apps.models import decoding
from tests.apps.language.test_sampling import PROMPTS, eager_model, texts
from tests.apps.language.test_window import VARIANTS, random_tokens
from tests.support.language_task import random_model

POSITIONS = {name: {"positions": name} for name in ("rotary", "alibi", "relative", "none")}


@pytest.mark.parametrize("variant", VARIANTS | POSITIONS)
@torch.inference_mode()
def test_replayed_steps_are_the_growing_ones(variant, tape):
    """Rows slide at different times, and one leaves; the graph of before a slide serves after it."""
    model = random_model(1, **(VARIANTS | POSITIONS)[variant]).double()
    fixed, growing = LanguageState(model, PROMPTS, 8, tape), LanguageState(model, PROMPTS, 8)
    rows = torch.arange(4)
    for t, ids in enumerate(random_tokens(4, 25)):
        if t == 11:
            rows = torch.tensor([0, 2, 3])
            for state in (fixed, growing):
                state.keep(rows)
        torch.testing.assert_close(fixed.step(ids[rows]), growing.step(ids[rows]), atol=1e-12, rtol=0)
    assert (tape.warmed_up, tape.captured, tape.replayed) == (2, 2, 25 - 2)


@torch.inference_mode()
def test_a_capture_that_failed_is_not_tried_again(tape, monkeypatch):
    def fail(step):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(tape, "capture", fail)
    state = LanguageState(random_model(1), PROMPTS, 8, tape)
    state.step(random_tokens(4, 1)[0])
    with pytest.warns(RuntimeWarning, match="generation goes on without CUDA graphs"):
        state.step(random_tokens(4, 1)[0])
    state.keep(torch.arange(2))
    for ids in random_tokens(2, 3):
        state.step(ids)  # a second warning would be an error


def test_a_state_is_freed_at_once(tape):
    """Its cache and graph would fill the memory of a device, which Python's garbage collector does not look at."""
    with torch.inference_mode():
        state = LanguageState(random_model(1), PROMPTS, 8, tape)
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
def test_texts_are_the_same(options, idle_rows, tape, monkeypatch):
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
