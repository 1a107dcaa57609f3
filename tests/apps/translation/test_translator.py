"""Text in, text out: order, odd input, scores, errors, and BLEU of what a user would read."""

import logging
import re
from dataclasses import replace

import pytest
import sacrebleu
import torch

from fastformer.apps.text import ParallelCorpus, SpecialIds, WordTokenizer, collate, encode_pairs
from fastformer.apps.text.scores import score_translations
from fastformer.apps.translation.model import TranslationModel, translation_loss
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Translator
from tests.support.translation_task import EOS, config, random_model

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FRENCH = dict(zip(WORDS, ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"], strict=True))


def french(text):
    """Word by word, with an apostrophe and a full stop that a tokenizer splits off."""
    return "l'" + " ".join(FRENCH[word] for word in text.split()) + "."


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(8, (n,), generator=generator).tolist()) for n in sizes]


@pytest.fixture(scope="module")
def translator():
    source = sentences(64, seed=0)
    corpus = ParallelCorpus(source, [french(text) for text in source])
    tokenizers = [WordTokenizer.from_lines(side) for side in (corpus.source, corpus.target)]
    torch.manual_seed(0)
    model = TranslationModel(
        config(
            source_vocabulary=tokenizers[0].size,
            target_vocabulary=tokenizers[1].size,
            d_model=32,
            heads=4,
            encoder_layers=1,
            decoder_layers=1,
            feed_forward=64,
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(150):
        drawn = sentences(48, seed=step + 1)
        pairs = encode_pairs(ParallelCorpus(drawn, [french(text) for text in drawn]), *tokenizers)
        batch = collate(pairs)
        optimizer.zero_grad()
        (translation_loss(model, batch) / batch.tokens).backward()
        optimizer.step()
    return Translator(model, *tokenizers, max_source_length=10)


def test_order_and_bleu(translator):
    """Detokenised translations in the order of the input, whatever the batches; sacrebleu itself scores them."""
    source = sentences(30, seed=9000)
    references = [french(text) for text in source]
    for options in (SearchOptions(beam=1), SearchOptions(beam=3)):
        translations = translator.translate(source, options, batch_size=7)
        assert sum(ours == theirs for ours, theirs in zip(translations, references, strict=True)) >= 24
        assert translations == translator.translate(source, options, batch_size=64)
        assert translations[::-1] == translator.translate(source[::-1], options, batch_size=7)
    scores = score_translations(translations, references)
    assert scores.bleu == sacrebleu.corpus_bleu(translations, [references]).score > 80
    assert "tok:13a" in scores.bleu_signature


def test_empty_lines_stay_where_they_are(translator):
    source = ["two one", "", "three", "   ", "\t"]
    actual = translator.translate(source)
    assert [bool(text) for text in actual] == [True, False, True, False, False]
    assert actual[0] == translator.translate(["two one"])[0]
    assert translator.translate([]) == []
    assert translator.translate(["", ""]) == ["", ""]
    [[nothing]] = translator.candidates([""], SearchOptions(beam=3, n_best=3))
    assert (nothing.text, nothing.log_probability, nothing.score) == ("", 0.0, 0.0)


def test_attention_reads_a_translation_that_does_not_end(translator):
    """With bos before it, it is a token shorter than the learned positions."""
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    sizes = {"source_vocabulary": tokenizers[0].size, "target_vocabulary": tokenizers[1].size}
    model = random_model(1, **sizes, positions="learned", max_positions=6, output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] -= 100
    maps = Translator(model, *tokenizers).attend("one two", kind="decoder")
    assert maps.weights.shape[-2:] == (6, 6)


def test_candidates(translator):
    source = sentences(6, seed=4)
    options = SearchOptions(beam=4, n_best=3)
    actual = translator.candidates(source, options)
    assert [len(best) for best in actual] == [3] * 6
    for best in actual:
        assert [c.score for c in best] == sorted((c.score for c in best), reverse=True)
    assert [best[0].text for best in actual] == translator.translate(source, options)
    # The log probability of the search is that of scoring its text.
    pairs = [(text, c) for text, best in zip(source, actual, strict=True) for c in best if c.text]
    scored = translator.score([text for text, _ in pairs], [c.text for _, c in pairs], batch_size=5)
    ids = [translator.target_tokenizer.encode(c.text) for _, c in pairs]
    for (_, c), (log_p, tokens), own in zip(pairs, scored, ids, strict=True):
        assert tokens == len(own) + 1
        if abs(c.log_probability / c.score - tokens) < 0.01:  # the text tokenises to what was decoded
            assert log_p == pytest.approx(c.log_probability, abs=1e-3)
    assert sum(abs(c.log_probability / c.score - n) < 0.01 for (_, c), (_, n) in zip(pairs, scored, strict=True)) >= 12


def test_a_too_long_sentence_is_cut_with_one_warning(translator, caplog):
    long = " ".join(["one"] * 30)
    with caplog.at_level(logging.WARNING, "fastformer"):
        actual = translator.translate([long, "two", long])
    assert [record.getMessage() for record in caplog.records] == ["2 of 3 sentences cut to 10 tokens"]
    assert actual[0] == translator.translate([" ".join(["one"] * 9)])[0]  # 9 words and eos
    caplog.clear()
    translator.translate([" ".join(["one"] * 9)])
    assert not caplog.records


def test_scores(translator):
    """Of a right translation, of a wrong one; independent of the batch; the model's own cross entropy."""
    source = sentences(9, seed=5)
    right, wrong = [french(text) for text in source], [french(text) for text in source[1:] + source[:1]]
    good, bad = translator.score(source, right), translator.score(source, wrong)
    assert sum(log_p for log_p, _ in good) > sum(log_p for log_p, _ in bad) + 10
    assert [n for _, n in good] == [len(translator.target_tokenizer.encode(text)) + 1 for text in right]
    batched = translator.score(source, right, batch_size=2)
    assert [log_p for log_p, _ in batched] == pytest.approx([log_p for log_p, _ in good], abs=1e-4)
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    loss = translation_loss(translator.model, collate(encode_pairs(ParallelCorpus(source, right), *tokenizers))).item()
    assert -sum(log_p for log_p, _ in batched) == pytest.approx(loss, rel=1e-4)
    assert translator.score([], []) == []


def test_argument_errors(translator):
    for method in (translator.translate, translator.candidates):
        with pytest.raises(ValueError, match="batch_size must be at least 1, not -2"):
            method(["one"], batch_size=-2)
        with pytest.raises(TypeError, match="sentences must be a list of sentences, not one string"):
            method("one two")
    for name, given in (("sources", ("ab", ["a", "b"])), ("targets", (["a", "b"], "ab"))):
        with pytest.raises(TypeError, match=rf"^{name} must be a list of {name}, not one string$"):
            translator.score(*given)


def test_a_tokenizer_of_another_model(translator):
    model, source, target = translator.model, translator.source_tokenizer, translator.target_tokenizer
    other = WordTokenizer.from_lines(["a b c"])
    for side, tokenizers in (("source", (other, target)), ("target", (source, other))):
        size = getattr(model.config, f"{side}_vocabulary")
        message = f"the {side} tokenizer has 7 entries, the model {size}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Translator(model, *tokenizers)
    swapped = [*target.words[:2], target.words[3], target.words[2], *target.words[4:]]
    moved = WordTokenizer(swapped, SpecialIds(bos_id=3, eos_id=2))
    with pytest.raises(ValueError, match=r"^the target tokenizer has bos_id 3, the model 2$"):
        Translator(model, source, moved)


def test_samples_depend_on_the_seed_and_not_on_the_batch(translator):
    source = sentences(12, seed=6) * 2
    options = SearchOptions(sample=True, temperature=2.0, seed=3)
    texts = translator.translate(source, options, batch_size=5)
    assert texts == translator.translate(source, options, batch_size=24)
    assert texts != translator.translate(source, replace(options, seed=4))
    assert texts[:12] != texts[12:]  # an equal sentence draws other numbers


def test_one_candidate_is_greedy_search_with_its_log_probability(translator):
    source = sentences(12, seed=7)
    sampled = translator.candidates(source, SearchOptions(sample=True, top_k=1))
    for [drawn], [best] in zip(sampled, translator.candidates(source, SearchOptions(beam=1)), strict=True):
        assert drawn.text == best.text
        assert drawn.log_probability == pytest.approx(best.log_probability, abs=1e-4)
