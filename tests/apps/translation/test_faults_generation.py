"""Faults of well-known tutorials that must not come back: in decoding, text and scores.

Where it is cheap the faulty variant stands beside ours, and the same property tells them apart.
"""

import re

import pytest
import torch

from fastformer.apps.text import WordTokenizer, collate_source, read_parallel
from fastformer.apps.text.scores import score_translations
from fastformer.apps.translation.search import SearchOptions, beam_search, greedy_search
from fastformer.apps.translation.state import DecoderState
from fastformer.apps.translation.translator import Translator
from tests.support.translation_task import (
    BOS,
    EOS,
    pairs_batch,
    random_batch,
    random_model,
    reverse_batch,
    reversing_model,
    split_rows,
)

# Decoding


class Rows:
    """Counts what decoding feeds to the target embedding."""

    def __init__(self, model, monkeypatch):
        self.tokens = []
        embed = model.target_embedding.forward

        def count(ids, positions, length):
            self.tokens.append(ids.numel())
            return embed(ids, positions, length)

        monkeypatch.setattr(model.target_embedding, "forward", count)


def test_each_step_works_on_one_token(monkeypatch):
    """A decoder that recomputes the padded prefix works on n (n + 1) / 2 tokens for a sentence of n."""
    model = random_model(8, output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] -= 100
    batch = random_batch([(4, 1)] * 3)
    rows = Rows(model, monkeypatch)
    options = SearchOptions(beam=2, max_ratio=0.0, max_extra=20)
    greedy_search(model, batch.source, batch.source_lengths, options)
    assert rows.tokens == [3] * 20
    rows.tokens.clear()
    beam_search(model, batch.source, batch.source_lengths, options)
    assert rows.tokens == [6] * 20
    # The tutorial's loop, by the same count.
    rows.tokens.clear()
    for n in range(1, 21):
        ids = torch.full((3 * n,), BOS)
        model(batch.source, batch.source_lengths, ids, torch.full((3,), n))
    assert sum(rows.tokens) == 3 * 210


def faulty_beam_search(model, row, beam, steps):
    """The tutorial's: every beam starts alike and takes its own best, and the number of steps is all that ends it."""
    prefixes = [[BOS] for _ in range(beam)]
    for _ in range(steps):
        for prefix in prefixes:
            ids = torch.tensor(prefix)
            hidden = model(row, torch.tensor([len(row)]), ids, torch.tensor([len(ids)]))
            prefix.append(int(model.logits(hidden[-1]).argmax()))
    return [prefix[1:] for prefix in prefixes]


@pytest.mark.slow
@torch.no_grad()
def test_beams_differ():
    model = reversing_model()
    batch = reverse_batch(60, 6)
    options = SearchOptions(beam=4, n_best=4)
    for row, found in zip(
        split_rows(batch), beam_search(model, batch.source, batch.source_lengths, options), strict=True
    ):
        assert len({tuple(h.ids) for h in found}) == 4
        assert len({tuple(ids) for ids in faulty_beam_search(model, row, 4, 3)}) == 1


@torch.no_grad()
@pytest.mark.slow
def test_beam_search_ends_with_the_sentence():
    """Not at an unfinished prefix: what wins was followed by eos, since the limit is far away."""
    model = reversing_model()
    batch = reverse_batch(70, 12)
    rows = split_rows(batch)
    for row, [best] in zip(rows, beam_search(model, batch.source, batch.source_lengths), strict=True):
        tokens = torch.tensor([BOS, *best.ids])
        hidden = model(row, torch.tensor([len(row)]), tokens, torch.tensor([len(tokens)]))
        log_p = model.logits(hidden).log_softmax(-1)
        total = log_p[range(len(tokens)), [*best.ids, EOS]].sum()
        assert best.log_probability == pytest.approx(float(total), abs=1e-4)
    longest = max(rows, key=len)
    assert EOS not in faulty_beam_search(model, longest, 2, 3)[0]


# Text and scores


class Recorder:
    """Keeps the sources that a model encodes."""

    def __init__(self, model, monkeypatch):
        self.sources = []
        encode = model.encode

        def record(source, lengths):
            self.sources += [row.tolist() for row in torch.split(source, lengths.tolist())]
            return encode(source, lengths)

        monkeypatch.setattr(model, "encode", record)


def words_and_model(**changes):
    words = WordTokenizer.from_lines(["a b c d e f"])
    return words, random_model(9, source_vocabulary=words.size, target_vocabulary=words.size, **changes)


def test_inference_gives_the_source_that_training_gave(monkeypatch):
    """With eos."""
    words, model = words_and_model()
    seen = Recorder(model, monkeypatch)
    Translator(model, words, words).translate(["a b", "c"], SearchOptions(beam=1))
    training = pairs_batch([words.encode("a b"), words.encode("c")], [[4], [4]])
    assert seen.sources == [row.tolist() for row in split_rows(training)]
    assert all(row[-1] == EOS for row in seen.sources)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_too_long_sentences_keep_their_eos(monkeypatch, positions):
    words, model = words_and_model(positions=positions, max_positions=6)
    seen = Recorder(model, monkeypatch)
    found = Translator(model, words, words, max_source_length=6).translate(["a b c d e f a b c d", "a"])
    assert len(found) == 2
    assert sorted(seen.sources, key=len) == [[*words.encode("a"), EOS], [*words.encode("a b c d e"), EOS]]


def test_no_newline_token(tmp_path):
    (tmp_path / "a.en").write_bytes(b"one two\r\nthree\n")
    (tmp_path / "a.fr").write_bytes(b"un deux\ntrois\n")
    corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.fr")
    assert corpus.source == ["one two", "three"]
    for splitting in ("punctuation", "whitespace"):
        words = WordTokenizer.from_lines([*corpus.source, "with one\n"], splitting=splitting)
        assert not [word for word in words.words if re.search(r"\s", word)]
        assert words.encode("one\n") == words.encode("one")


def aligned_score(translation, reference):
    """The tutorials' "BLEU": the share of equal characters at equal positions."""
    return (
        100 * sum(a == b for a, b in zip(translation, reference, strict=False)) / min(len(translation), len(reference))
    )


def test_bleu_is_sacrebleu_of_decoded_text():
    """A right translation shifted by a word scores high and a truncated one low; aligned characters say the reverse."""
    sacrebleu = pytest.importorskip("sacrebleu")
    reference = "The two men in red shirts are waiting at the corner of a busy street for the bus to come ."
    shifted, truncated = f"So {reference}", " ".join(reference.split()[:8])
    assert aligned_score(shifted, reference) < 20
    assert aligned_score(truncated, reference) == 100
    right, short = (score_translations([text], [reference]).bleu for text in (shifted, truncated))
    assert right > 90
    assert short < 40
    assert right == pytest.approx(sacrebleu.corpus_bleu([shifted], [[reference]]).score)


def test_bleu_is_not_teacher_forced(monkeypatch):
    """Decoding gets the source alone: the model is never run on a reference."""
    words, model = words_and_model()

    def forward(*args):
        raise AssertionError("decoding ran the model on given targets")

    monkeypatch.setattr(model, "forward", forward)
    translations = Translator(model, words, words).translate(["a b c", "d"], SearchOptions(beam=2))
    assert score_translations(translations, ["a b c", "d"]).sentences == 2
    source, lengths = collate_source([words.encode("a b c")], words.special_ids)
    assert DecoderState(model, source, lengths).step(torch.tensor([BOS])).shape == (1, words.size)
