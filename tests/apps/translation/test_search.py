"""Greedy and beam search: loops without a cache find the same, for each sentence of a batch by itself."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from tests.support.translation_task import EOS, PAD, UNK, random_model, reverse_batch, reversing_model
from tests.support.uncached_search import (
    RAGGED,
    naive_beam,
    naive_greedy,
    rows_of,
    sequence_scores,
    sources,
)


def pad(source, lengths, extra=0):
    rows = nn.utils.rnn.pad_sequence(rows_of(source, lengths), batch_first=True, padding_value=PAD)
    return nn.functional.pad(rows, (0, extra), value=PAD)


MODELS = {
    "pre-norm": {"encoder_layers": 1},
    "post-norm, no final norms": {"norm_first": False, "final_norm": False, "embeddings": "shared"},
    "learned, no biases": {"positions": "learned", "bias": False, "output_bias": True, "embeddings": "separate"},
}
RULES = {
    "plain": {},
    "min_length": {"min_length": 5},
    "no_repeat_ngram 1": {"no_repeat_ngram": 1},
    "no_repeat_ngram 2": {"no_repeat_ngram": 2, "min_length": 2},
    "no_repeat_ngram 3": {"no_repeat_ngram": 3},
    "max_length": {"max_length": 3},
}
CASES = [*((variant, "plain") for variant in MODELS), *(("pre-norm", rule) for rule in RULES if rule != "plain")]


@pytest.mark.parametrize(("variant", "rule"), CASES)
def test_greedy_is_the_uncached_loop(variant, rule):
    """For random models and ragged batches, packed and padded; log probabilities are the model's own."""
    model = random_model(1, **MODELS[variant]).double()
    options = SearchOptions(beam=1, max_ratio=1.5, max_extra=4, **RULES[rule])
    source, lengths = sources(RAGGED)
    actual = greedy_search(model, source, lengths, options)
    for row, hypothesis in zip(rows_of(source, lengths), actual, strict=True):
        ids, log_p = naive_greedy(model, row, options)
        assert hypothesis.ids == ids
        assert hypothesis.log_probability == pytest.approx(log_p, abs=1e-4)
        assert hypothesis.score == hypothesis.log_probability
    for extra in (0, 2):
        again = greedy_search(model, pad(source, lengths, extra), lengths, options)
        assert [h.ids for h in again] == [h.ids for h in actual]


@pytest.mark.parametrize(("variant", "rule"), CASES)
def test_beam_search_is_the_uncached_loop(variant, rule):
    model = random_model(2, **MODELS[variant]).double()
    options = SearchOptions(beam=3, n_best=3, length_penalty=0.7, max_ratio=1.0, max_extra=3, **RULES[rule])
    source, lengths = sources([3, 1, 5])
    for row, actual in zip(rows_of(source, lengths), beam_search(model, source, lengths, options), strict=True):
        expected = naive_beam(model, row, options)
        assert [h.ids for h in actual] == [ids for ids, _, _ in expected]
        assert [h.log_probability for h in actual] == pytest.approx([total for _, total, _ in expected], abs=1e-4)
        assert [h.score for h in actual] == pytest.approx([score for _, _, score in expected], abs=1e-4)


def test_wide_beam_search_is_exhaustive():
    """With as many beams as there are sequences, the n best are the n best of all of them."""
    model = random_model(3, source_vocabulary=6, target_vocabulary=6).double()
    words, L = [UNK, 4, 5], 4
    every = [[*prefix, EOS] for n in range(L) for prefix in itertools.product(words, repeat=n)]
    every += [list(tokens) for tokens in itertools.product(words, repeat=L)]
    source, lengths = sources([2, 3], vocabulary=6)
    true = [sequence_scores(model, row, every) for row in rows_of(source, lengths)]
    for length_penalty in (0.0, 0.6, 1.0):
        options = SearchOptions(beam=len(every), n_best=len(every), max_length=L, length_penalty=length_penalty)
        for totals, actual in zip(true, beam_search(model, source, lengths, options), strict=True):
            scores = {
                tuple(i for i in tokens if i != EOS): total / len(tokens) ** length_penalty
                for tokens, total in zip(every, totals, strict=True)
            }
            best = sorted(scores, key=lambda ids: -scores[ids])
            assert len(actual) == len(every) == 121
            assert [tuple(h.ids) for h in actual] == best
            assert [h.score for h in actual] == pytest.approx([scores[ids] for ids in best], abs=1e-5)


def test_vocabulary_smaller_than_the_beam():
    """Where there are fewer hypotheses than beams, only real ones come back."""
    model = random_model(7, source_vocabulary=5, target_vocabulary=5).double()
    source, lengths = sources([1, 2], vocabulary=5)
    actual = beam_search(model, source, lengths, SearchOptions(beam=8, n_best=8, max_length=1))
    assert [sorted(h.ids for h in sentence) for sentence in actual] == [[[], [UNK], [4]]] * 2
    assert all(math.isfinite(h.score) for sentence in actual for h in sentence)


def one_of(found):
    """The best hypothesis of each sentence, of either search."""
    return [each[0] if isinstance(each, list) else each for each in found]


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize(
    ("bias", "rules", "sizes"),
    [
        (20, {"min_length": 4}, [4, 4]),  # ends as soon as it may
        (-100, {"max_ratio": 1.5, "max_extra": 2}, [4 + 2, 12 + 2]),  # never ends
        (-100, {"max_ratio": 1.5, "max_extra": 2, "max_length": 9}, [6, 9]),
        (-100, {"max_ratio": 0.0, "max_extra": 0}, [1, 1]),
        (20, {"min_length": 30}, [30, 30]),  # whatever the source
    ],
)
def test_lengths(search, bias, rules, sizes):
    """min_length counts tokens before eos, max_length all; each sentence has its own limit."""
    model = random_model(8, output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] += bias
    actual = search(model, *sources([2, 7]), SearchOptions(beam=2, **rules))
    assert [len(h.ids) for h in one_of(actual)] == sizes


@pytest.mark.parametrize("same", ["pad_id", "bos_id"])
@pytest.mark.parametrize("search", [greedy_search, beam_search])
def test_what_ends_may_be_what_begins_or_pads(same, search):
    model = random_model(1, output_bias=True, **{same: EOS}).eval()
    with torch.no_grad():
        model.output.bias[EOS] += 1000.0
    actual = search(model, *sources(RAGGED), SearchOptions(min_length=2, max_length=9))
    assert {len(h.ids) for h in one_of(actual)} == {2}


def test_learned_positions_end_the_translation():
    """The limit is also what the model can hold: no error in the middle of a search."""
    model = random_model(9, positions="learned", max_positions=8, output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] -= 100
    source, lengths = sources([7, 1])
    assert [len(h.ids) for h in greedy_search(model, source, lengths)] == [8, 8]
    assert [len(h.ids) for h in greedy_search(model, source, lengths, SearchOptions(sample=True))] == [8, 8]
    assert [len(h.ids) for [h] in beam_search(model, source, lengths)] == [8, 8]


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize("part", ["output", "decoder.layers.0.linear1"])
def test_scores_that_are_no_numbers_are_no_translation(search, part):
    model = random_model(1).eval()
    with torch.no_grad():
        model.get_submodule(part).weight[5] = torch.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        search(model, *sources(RAGGED), SearchOptions(max_length=3, beam=2))


@pytest.mark.parametrize("ids", [{}, {"pad_id": 0}], ids=str)
def test_a_diverged_model_draws_no_translation(ids):
    """Also where id 0, which stands for any then, is forbidden."""
    model = random_model(1, **ids)
    with torch.no_grad():
        model.output.weight[:] = torch.nan
    source, lengths = sources(RAGGED)
    options, streams = SearchOptions(sample=True, max_length=3), RandomStreams(1).take([[n] for n in RAGGED])
    with pytest.raises(FloatingPointError, match="diverged"):
        beam_search(model, source, lengths, options, streams)


def test_nothing_left_to_say_ends_the_sentence():
    """Every word used up, the end still forbidden: it ends all the same, and no score is NaN."""
    model = random_model(11, source_vocabulary=7, target_vocabulary=7)
    options = SearchOptions(beam=3, n_best=3, no_repeat_ngram=1, min_length=9, max_extra=20)
    actual = beam_search(model, *sources([2, 4], vocabulary=7), options)
    for h in itertools.chain(*actual):
        assert sorted(h.ids) == [UNK, 4, 5, 6]
        assert math.isfinite(h.score)
    assert all(len({tuple(h.ids) for h in sentence}) == 3 for sentence in actual)


@pytest.mark.parametrize("search", [greedy_search, beam_search])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("leave", [True, False])
def test_a_sentence_does_not_depend_on_its_batch(search, trained, leave, monkeypatch):
    """Whether sentences that are done leave it or not."""
    if not leave:
        monkeypatch.setattr(sys.modules[search.__module__], "_RUNNING", 0)
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


@pytest.mark.slow
def test_finished_sentences_leave_the_batch(monkeypatch):
    """At most an eighth of the rows have finished, and no sentence waits for the longest one of the batch."""
    search = sys.modules[beam_search.__module__]
    steps, step = [], search.next_logits  # rows of every step

    def count(model, embedding, cache, ids):
        steps.append(len(ids))
        return step(model, embedding, cache, ids)

    monkeypatch.setattr(search, "next_logits", count)
    model = reversing_model()
    batch = reverse_batch(2000, 40)
    actual = greedy_search(model, batch.source, batch.source_lengths)
    sizes = torch.tensor([len(h.ids) + 1 for h in actual])
    running = [int((sizes > t).sum()) for t in range(int(sizes.max()))]
    assert all(left <= rows < left / 0.875 for left, rows in zip(running, steps, strict=True))
    # What is still computed for a finished sentence does not count.
    for row, hypothesis in zip(rows_of(batch.source, batch.source_lengths), actual, strict=True):
        [expected] = sequence_scores(model, row, [[*hypothesis.ids, EOS]])
        assert hypothesis.log_probability == pytest.approx(expected, abs=1e-4)

    rows, alone = rows_of(batch.source, batch.source_lengths)[:5], []
    for row in rows:
        steps.clear()
        beam_search(model, row, torch.tensor([len(row)]), SearchOptions(beam=3))
        alone.append(len(steps))
    steps.clear()
    beam_search(model, torch.cat(rows), batch.source_lengths[:5], SearchOptions(beam=3))
    assert steps == [3 * sum(n > t for n in alone) for t in range(max(alone))]


def test_drawn_sentences_that_have_ended_wait_for_the_others(monkeypatch):
    """The first ends at once; its row would soon run out of bigrams, while the second goes on for 25 tokens."""
    monkeypatch.setattr(sys.modules[beam_search.__module__], "_RUNNING", 0)
    logits = torch.zeros(2, 12)
    logits[0, EOS], logits[1, EOS] = 50.0, -50.0
    monkeypatch.setattr(sys.modules[beam_search.__module__], "next_logits", lambda *_: logits)
    model = random_model(11, source_vocabulary=12, target_vocabulary=12)
    options = SearchOptions(sample=True, no_repeat_ngram=2, max_length=25)
    source, lengths = sources([9, 9], vocabulary=12)
    drawn = beam_search(model, source, lengths, options, RandomStreams(1).take([[1], [2]]))
    assert [len(h.ids) for [h] in drawn] == [0, 25]


def test_no_sentence_has_no_translation():
    nothing = torch.empty(0, dtype=torch.int64)
    assert greedy_search(random_model(), nothing, nothing) == []
