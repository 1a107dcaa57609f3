"""Search in batches: independence, sentences that leave, the cache, modes and dtypes."""

import pytest
import torch

from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.state import DecoderState
from tests.support.translation_task import BOS, EOS, random_model, reverse_batch, reversing_model
from tests.support.uncached_search import (
    log_probabilities,
    rows_of,
    sequence_scores,
    sources,
)


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize("trained", [False, True])
def test_a_sentence_does_not_depend_on_its_batch(search, trained):
    model = reversing_model() if trained else random_model(12).double()
    source, lengths = sources([4, 1, 7, 2, 6, 6, 3, 1, 5], vocabulary=12)
    rows = rows_of(source, lengths)
    options = SearchOptions(beam=3, n_best=3) if search is beam_search else SearchOptions(beam=1)

    def ids(found):
        return [h.ids for h in found] if isinstance(found, list) else found.ids

    together = [ids(h) for h in search(model, source, lengths, options)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = search(model, torch.cat([rows[i] for i in order]), lengths[order], options)
    assert [ids(h) for h in shuffled] == [together[i] for i in order]
    for row, expected in zip(rows, together, strict=True):
        assert [ids(h) for h in search(model, row, torch.tensor([len(row)]), options)] == [expected]


@pytest.fixture
def steps(monkeypatch):
    """The number of rows of every decoder step."""
    seen = []
    step = DecoderState.step

    def count(self, ids):
        seen.append(len(ids))
        assert ids.dim() == 1  # one token a row, never a prefix
        return step(self, ids)

    monkeypatch.setattr(DecoderState, "step", count)
    return seen


@pytest.mark.slow
def test_finished_sentences_leave_the_batch(steps):
    model = reversing_model()
    batch = reverse_batch(2000, 40)
    found = greedy_search(model, batch.source, batch.source_lengths)
    sizes = torch.tensor([len(h.ids) + 1 for h in found])
    running = [int((sizes > t).sum()) for t in range(int(sizes.max()))]
    assert len(steps) == len(running)
    # At most an eighth of the rows have finished.
    assert all(left <= rows < left / 0.875 for left, rows in zip(running, steps, strict=True))
    assert sum(steps) < 0.8 * steps[0] * len(steps)
    # What is still computed for a finished sentence does not count.
    for row, hypothesis in zip(rows_of(batch.source, batch.source_lengths), found, strict=True):
        [expected] = sequence_scores(model, row, [[*hypothesis.ids, EOS]])
        assert hypothesis.log_probability == pytest.approx(expected, abs=1e-4)

    steps.clear()
    found = beam_search(model, batch.source, batch.source_lengths, SearchOptions(beam=3))
    assert steps[0] == 120
    assert all(rows % 3 == 0 for rows in steps)
    assert steps == sorted(steps, reverse=True)
    assert sum(steps) < 0.8 * steps[0] * len(steps)
    # No sentence waits for the longest one of the batch.
    alone = []
    for row in rows_of(batch.source, batch.source_lengths)[:5]:
        steps.clear()
        beam_search(model, row, torch.tensor([len(row)]), SearchOptions(beam=3))
        alone.append(len(steps))
    steps.clear()
    kept = torch.cat(rows_of(batch.source, batch.source_lengths)[:5])
    beam_search(model, kept, batch.source_lengths[:5], SearchOptions(beam=3))
    assert steps == [3 * sum(n > t for n in alone) for t in range(max(alone))]


@torch.no_grad()
def test_cached_logits_are_the_models():
    """Step by step, with rows that are reordered and dropped on the way."""
    model = random_model(14).double()
    source, lengths = sources([3, 1, 6])
    rows = rows_of(source, lengths)
    N = 2
    state = DecoderState(model, source, lengths, hypotheses=N)
    generator = torch.Generator().manual_seed(1)
    prefixes = [[] for _ in range(len(rows) * N)]
    fed = torch.full((len(prefixes),), BOS)
    for t in range(36):
        logits = state.step(fed).float().log_softmax(-1)
        for i, (prefix, row) in enumerate(zip(prefixes, logits, strict=True)):
            torch.testing.assert_close(row, log_probabilities(model, rows[i // N], [prefix])[0], atol=1e-5, rtol=0)
        if t % 3 == 1:
            swap = torch.cat([torch.randint(b * N, b * N + N, (N,), generator=generator) for b in range(len(rows))])
            state.reorder(swap)
            prefixes = [list(prefixes[i]) for i in swap.tolist()]
        if t == 5:
            state.keep(torch.tensor([0, 2]))
            rows, prefixes = (rows[0], rows[2]), prefixes[:N] + prefixes[2 * N :]
        fed = torch.randint(4, 17, (len(prefixes),), generator=generator)
        for prefix, token in zip(prefixes, fed.tolist(), strict=True):
            prefix.append(token)


def test_empty_batch():
    model = random_model()
    nothing, lengths = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    assert greedy_search(model, nothing, lengths) == []
    assert beam_search(model, nothing, lengths) == []
