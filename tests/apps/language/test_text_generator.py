"""Prompts in, text out: what was learned, odd prompts and errors."""

import logging
from dataclasses import replace

import pytest
import torch

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.sampling import SamplingOptions, TextGenerator, sample
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.text import (
    EncodedDocuments,
    LanguageBatches,
    Sequences,
    SpecialIds,
    WordTokenizer,
)
from tests.support.language_task import random_model

ALPHABET = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


@pytest.fixture(scope="module")
def alphabet():
    """A model that has learned to go on in the alphabet, around its end."""
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    ids = tokenizer.encode(" ".join(ALPHABET * 3))
    documents = EncodedDocuments(Sequences.from_lists([ids[i : i + 20] for i in range(12)]), SpecialIds())
    torch.manual_seed(0)
    model = LanguageModel(
        LanguageConfig(16, d_model=32, heads=2, layers=1, feed_forward=32, dropout=0.0, norm_eps=1e-5)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(40):
        for batch in LanguageBatches(documents, context=8, tokens=1000, seed=step).epoch(0):
            optimizer.zero_grad()
            (language_model_loss(model, batch) / batch.tokens).backward()
            optimizer.step()
    return TextGenerator(model, tokenizer, context=8)


def test_what_was_learned_goes_on_beyond_the_context(alphabet):
    options = SamplingOptions(temperature=0, max_new_tokens=40, stop_at_eos=False, min_new_tokens=40)
    assert alphabet.generate(["d e f", "k", "a b c d e f g h i j k l a"], options) == [
        " " + " ".join((ALPHABET * 5)[6:46]),
        " l " + " ".join((ALPHABET * 5)[:39]),
        " " + " ".join((ALPHABET * 5)[1:41]),
    ]


def test_lines_of_a_prompt_and_what_stands_before_it(alphabet, monkeypatch):
    """New lines are read as eos; the text goes on in the last line; first_id stands where bos stood."""
    tokenizer, given = alphabet.tokenizer, []

    def planned(model, prompts, *rest):
        given.extend(prompts)
        for i in [*tokenizer.encode("c"), tokenizer.eos_id, *tokenizer.encode("d e")]:
            yield [(row, i) for row in range(len(prompts))]

    monkeypatch.setattr("fastformer.apps.language.sampling.sample", planned)
    options = SamplingOptions(stop_at_eos=False)
    prompts = ["a b", "a\nb", "a\n", "", "\n\na"]
    expected = [" c\nd e", " c\nd e", "c\nd e", "c\nd e", " c\nd e"]
    a, b, eos = *tokenizer.encode("a b"), tokenizer.eos_id
    for first in (tokenizer.bos_id, eos):
        given.clear()
        generator = TextGenerator(alphabet.model, tokenizer, 8, first_id=first)
        assert generator.generate(prompts, options) == expected
        assert sorted(given) == sorted([first, *ids] for ids in ([a, b], [a, eos, b], [a, eos], [], [eos, eos, a]))
    given.clear()
    alphabet.generate(["a"])
    assert given == [[tokenizer.bos_id, a]]


def test_without_a_seed_texts_differ():
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    generator = TextGenerator(random_model(1, vocabulary=tokenizer.size), tokenizer, context=12)
    options = SamplingOptions(max_new_tokens=30, stop_at_eos=False)
    assert generator.generate(["a"], options) != generator.generate(["a"], options)
    seeded = replace(options, seed=1)
    assert generator.generate(["a"], seeded) == generator.generate(["a"], seeded)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    generator.generate(["a"], seeded)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prompt_that_is_longer_than_the_context(alphabet, caplog):
    """Its last tokens are read, bos is not among them; one warning a call."""
    long = " ".join(ALPHABET * 2)
    options = SamplingOptions(temperature=0, max_new_tokens=3)
    with caplog.at_level(logging.WARNING, "fastformer"):
        found = alphabet.generate([long, "a b c d e f g h i j"[:13], long], options)
    message = "2 of 3 prompts are longer than the context: the last 8 tokens are read"
    assert [record.getMessage() for record in caplog.records] == [message]
    ids = alphabet.tokenizer.encode(long)[-8:]
    steps = sample(alphabet.model, [ids], options, 8, RandomStreams(0), 0)
    assert alphabet.tokenizer.decode([i for [(_, i)] in steps]) == found[0].strip()
    assert found[0] == found[2]


def test_unknown_words_are_counted_and_do_not_stop_anything(alphabet, caplog):
    with caplog.at_level(logging.WARNING, "fastformer"):
        texts = alphabet.generate(["b yak zebra", "a zebra", "c"], SamplingOptions(max_new_tokens=2, temperature=0))
        assert len(texts) == 3
        alphabet.generate(["a b"], SamplingOptions(max_new_tokens=1))
    message = "the model does not know 3 words or characters of the prompts"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_argument_errors(alphabet):
    with pytest.raises(TypeError, match=r"^prompts must be a list of prompts, not one string$"):
        alphabet.generate("a b")
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, not 0$"):
        alphabet.generate(["a"], batch_size=0)
    for context in (0, -1):
        with pytest.raises(ValueError, match=f"^context must be at least 1, not {context}$"):
            TextGenerator(alphabet.model, alphabet.tokenizer, context)
    for first in (-1, 16):
        with pytest.raises(ValueError, match=rf"^first_id .* at least 0 and below vocabulary \(16\), not {first}$"):
            TextGenerator(alphabet.model, alphabet.tokenizer, 8, first_id=first)
    learned = random_model(vocabulary=16, positions="learned", max_positions=5)
    with pytest.raises(ValueError, match=r"^context must be at least 1 and at most max_positions \(5\), not 6$"):
        TextGenerator(learned, alphabet.tokenizer, 6)
