"""`TextGenerator` continues prompts as it learned, by batch and as a stream, and names prompts that it cannot read."""

import logging
from dataclasses import replace

import pytest
import torch

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.sampling import SamplingOptions, TextGenerator
from fastformer.apps.text import EncodedDocuments, LanguageBatches, Sequences, SpecialIds, WordTokenizer
from tests.support.language_task import random_model

ALPHABET = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]


@pytest.fixture(scope="module")
def alphabet():
    """A generator that has learned to continue the alphabet, also after its end."""
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    ids = tokenizer.encode(" ".join(ALPHABET * 3))
    documents = EncodedDocuments(Sequences.from_lists([ids[i : i + 20] for i in range(12)]), SpecialIds())
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(16, d_model=32, heads=2, layers=1, feed_forward=32, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(40):
        for batch in LanguageBatches(documents, context=8, tokens=1000, seed=step).epoch(0):
            optimizer.zero_grad()
            (language_model_loss(model, batch) / batch.tokens).backward()
            optimizer.step()
    return TextGenerator(model, tokenizer, context=8)


def test_a_learned_text_continues_beyond_the_context_by_batch_and_as_a_stream(alphabet, caplog):
    options = SamplingOptions(temperature=0, max_new_tokens=40, stop_at_eos=False, min_new_tokens=40)
    prompts = ["d e f", "k", "a b c d e f g h i j k l a"]
    expected = [
        " " + " ".join((ALPHABET * 5)[6:46]),
        " l " + " ".join((ALPHABET * 5)[:39]),
        " " + " ".join((ALPHABET * 5)[1:41]),
    ]
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert alphabet.generate(prompts, options, batch_size=2) == expected
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 1 prompts are longer than the context: the last 8 tokens are read"
    ]
    assert ["".join(alphabet.stream(prompt, options)) for prompt in prompts] == expected
    assert list(alphabet.stream("d", replace(options, max_new_tokens=2, min_new_tokens=0))) == [" e", " f"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert len(alphabet.generate(["b yak zebra", "a zebra", "c"], SamplingOptions(max_new_tokens=1))) == 3
    message = "the model does not know 3 words or characters of the prompts"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_new_lines_are_eos_and_first_id_precedes_prompts(alphabet, monkeypatch):
    tokenizer, encoded = alphabet.tokenizer, []

    def planned(model, prompts, *rest):
        encoded.extend(prompts)
        for i in [*tokenizer.encode("c"), tokenizer.eos_id, *tokenizer.encode("d e")]:
            yield [(row, i) for row in range(len(prompts))]

    monkeypatch.setattr("fastformer.apps.language.sampling.sample", planned)
    options, prompts = SamplingOptions(stop_at_eos=False), ["a b", "a\nb", "a\n", "", "\n\na"]
    a, b, eos = *tokenizer.encode("a b"), tokenizer.eos_id
    for first in (None, eos):
        encoded.clear()
        generator = TextGenerator(alphabet.model, tokenizer, 8, first_id=first)
        assert generator.generate(prompts, options) == [" c\nd e", " c\nd e", "c\nd e", "c\nd e", " c\nd e"]
        begin = tokenizer.bos_id if first is None else first
        assert encoded == [[begin, *ids] for ids in ([a, b], [a, eos, b], [a, eos], [], [eos, eos, a])]


def test_texts_are_seeded_without_the_random_state_of_torch():
    tokenizer = WordTokenizer.from_lines([" ".join(ALPHABET)])
    generator = TextGenerator(random_model(1, vocabulary=tokenizer.size, output_bias=True), tokenizer, context=12)
    options = SamplingOptions(max_new_tokens=30, stop_at_eos=False)
    assert generator.generate(["a"], options) != generator.generate(["a"], options)
    before = torch.get_rng_state()
    seeded = replace(options, seed=1)
    assert (
        generator.generate(["a"], seeded)
        == generator.generate(["a"], seeded)
        == ["".join(generator.stream("a", seeded))]
    )
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():  # a model that ends at once
        generator.model.output.bias[tokenizer.eos_id] = 1e3
    assert generator.generate(["a"]) == ["".join(generator.stream("a"))] == [""]


def test_wrong_arguments_are_named(alphabet):
    with pytest.raises(TypeError, match=r"^prompts must be a list of prompts, not one string$"):
        alphabet.generate("a b")
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, not 0$"):
        alphabet.generate(["a"], batch_size=0)
    with pytest.raises(ValueError, match=r"^first_id .* at least 0 and below vocabulary \(16\), not 16$"):
        TextGenerator(alphabet.model, alphabet.tokenizer, 8, first_id=16)
    learned = random_model(vocabulary=16, positions="learned", max_positions=5)
    for context in (0, 6):
        with pytest.raises(ValueError, match=rf"^context must be at least 1 .*max_positions \(5\), not {context}$"):
            TextGenerator(learned, alphabet.tokenizer, context)
