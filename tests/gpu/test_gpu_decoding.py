"""Decoding with CUDA graphs: the same results, one wait a token, and a capture that fails leaves everything usable."""

import pytest
import torch

import fastformer
from fastformer.apps.translation import state as states
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.state import DecoderState, StaticDecoderState
from tests.support.gpu import MARKS, captured, counted_captures, no_host_sync
from tests.support.recorded_steps import steps_of_both
from tests.support.translation_task import BOS, random_model
from tests.support.uncached_search import RAGGED, sources

pytestmark = MARKS


def gpu_model(dtype=torch.float32, **changes):
    return random_model(1, d_model=64, heads=2, **changes).to("cuda", dtype)


@pytest.fixture
def captures(monkeypatch):
    return counted_captures(monkeypatch)


# Random errors of the dtype, as a share of the norm; a position that stands still makes it 0.09 and more.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@torch.inference_mode()
def test_replayed_steps_are_the_growing_ones(dtype, norm_first, backend, captures, monkeypatch):
    """With rows that are reordered and leave, and a cache that grows."""
    monkeypatch.setattr(states, "_FIRST_CAPACITY", 12)
    model = gpu_model(dtype, norm_first=norm_first)
    with fastformer.backend(backend):
        for static, growing in steps_of_both(model, RAGGED, 40, hypotheses=2, leave_at=(3, 14)):
            error = (static.float() - growing.float()).norm() / growing.float().norm()
            assert float(error) <= TOLERANCE[dtype]
    assert len(captures) == 3


@pytest.mark.parametrize("rules", [{}, {"min_length": 5, "no_repeat_ngram": 2}], ids=str)
@pytest.mark.parametrize("find", [greedy_search, beam_search])
def test_searches_find_the_same(find, rules, captures):
    model = gpu_model()
    source, lengths = sources([*RAGGED, 20])
    options = {"beam": 1 if find is greedy_search else 3, **rules}
    expected = find(model, source.cuda(), lengths, SearchOptions(**options))
    found = find(model, source.cuda(), lengths, SearchOptions(**options, cuda_graphs=True))
    for one, two in zip(found, expected, strict=True):
        for a, b in zip(*(x if isinstance(x, list) else [x] for x in (one, two)), strict=True):
            assert a.ids == b.ids
            assert a.log_probability == pytest.approx(b.log_probability, abs=1e-3)
    assert captures


@torch.inference_mode()
def test_a_replayed_step_waits_for_nothing(captures):
    source, lengths = sources(RAGGED)
    state = StaticDecoderState(gpu_model(), source.cuda(), lengths, longest=40)
    ids = torch.full((len(RAGGED),), BOS, device="cuda")
    for _ in range(3):
        state.step(ids)
    assert len(captures) == 1
    with no_host_sync():
        for _ in range(10):
            state.step(ids)


def test_a_capture_that_fails_leaves_everything_usable(captures, monkeypatch):
    model = gpu_model()
    source, lengths = sources(RAGGED)
    source = source.cuda()
    expected = greedy_search(model, source, lengths)
    forward = DecoderState._logits

    def waiting(self, ids, positions, length):
        assert int(ids[0]) >= 0
        return forward(self, ids, positions, length)

    with monkeypatch.context() as patch:
        patch.setattr(DecoderState, "_logits", waiting)
        with pytest.warns(RuntimeWarning, match="goes on without CUDA graphs") as said:
            found = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=True))
    assert len([w for w in said if "CUDA graphs" in str(w.message)]) == 1
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert not captures
    before = torch.randn(1000, device="cuda")
    assert not torch.equal(before, torch.randn(1000, device="cuda"))
    replay, [drawn] = captured(lambda: [torch.randn(1000, device="cuda")])
    replay()
    assert torch.isfinite(drawn).all()
    found = greedy_search(model, source, lengths, SearchOptions(beam=1, cuda_graphs=True))
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert captures
