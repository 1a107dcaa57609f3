"""Prompts in, text out: what was learned, at once and piece by piece, odd prompts, modes and errors."""

import io
import logging
from dataclasses import replace

import pytest
import sentencepiece
import torch

from fastformer.apps.language.model import LanguageConfig, LanguageModel, language_model_loss
from fastformer.apps.language.sampling import SamplingOptions, random_streams, sample
from fastformer.apps.language.text_generator import TextGenerator
from fastformer.apps.text import (
    EncodedDocuments,
    LanguageBatches,
    SentencePieceTokenizer,
    Sequences,
    SpecialIds,
    WordTokenizer,
    train_sentencepiece,
)
from tests.support.language_task import random_model

ALPHABET = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]
LINES = [
    'the cat said: "I don\'t know (yet)", and the dog - a well-known one - said nothing; 1,000 times.',
    "l'homme dit «oui» à 12:30, n'est-ce pas? [vraiment] $5 50% … {ok}!",
    "wir sehen zwölf Boote am Fluß",
]


def byte_fallback(lines):
    """A sentencepiece model that writes characters which it does not know as bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="<pad>",
        bos_piece="<bos>",
        eos_piece="<eos>",
    )
    return SentencePieceTokenizer(model.getvalue())


TOKENIZERS = {
    "words": lambda: WordTokenizer.from_lines(LINES),
    "words at spaces": lambda: WordTokenizer.from_lines(LINES, splitting="whitespace"),
    "unigram": lambda: train_sentencepiece(LINES, 80),
    "bpe": lambda: train_sentencepiece(LINES, 80, model_type="bpe"),
    "bytes": lambda: byte_fallback(LINES),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def generator(request):
    """A model that knows nothing, so that anything may follow anything."""
    tokenizer = TOKENIZERS[request.param]()
    return TextGenerator(random_model(1, vocabulary=tokenizer.size), tokenizer, context=12)


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
    assert "".join(alphabet.stream("d e f", options)) == " " + " ".join((ALPHABET * 5)[6:46])


@pytest.mark.parametrize("stop_at_eos", [True, False], ids=["one text", "lines"])
def test_pieces_joined_are_the_text(generator, stop_at_eos, monkeypatch):
    """For any ids in any order: quotation marks, brackets, halves of characters, unknown tokens, ends of line."""
    vocabulary, eos = generator.tokenizer.size, generator.tokenizer.eos_id

    def anything(model, prompts, options, *rest):
        drawn = torch.randint(vocabulary, (options.max_new_tokens, len(prompts)), generator=source)
        drawn[(drawn == 1) | (drawn == 2)] = eos  # pad and bos are never written, lines end often
        for ids in drawn[: -1 if stop_at_eos else None].tolist():
            yield [(row, i if not stop_at_eos or i != eos else eos + 1) for row, i in enumerate(ids)]
        if stop_at_eos:
            yield [(row, eos) for row in range(len(prompts))]

    monkeypatch.setattr("fastformer.apps.language.text_generator.sample", anything)
    options = SamplingOptions(max_new_tokens=40, stop_at_eos=stop_at_eos)
    for prompt in ("the cat said: \"I don't", "", 'dit «oui»\n"oui', "unknown wörds", "  (  ", "猫"):
        for seed in range(20):
            source = torch.Generator().manual_seed(seed)
            [text] = generator.generate([prompt], options)
            source = torch.Generator().manual_seed(seed)
            pieces = list(generator.stream(prompt, options))
            assert "".join(pieces) == text
            assert all(pieces)


def test_lines_of_a_prompt_and_what_stands_before_it(alphabet, monkeypatch):
    """New lines are read as eos; the text goes on in the last line; first_id stands where bos stood."""
    tokenizer, given = alphabet.tokenizer, []

    def planned(model, prompts, *rest):
        given.extend(prompts)
        for i in [*tokenizer.encode("c"), tokenizer.eos_id, *tokenizer.encode("d e")]:
            yield [(row, i) for row in range(len(prompts))]

    monkeypatch.setattr("fastformer.apps.language.text_generator.sample", planned)
    options = SamplingOptions(stop_at_eos=False)
    prompts = ["a b", "a\nb", "a\n", "", "\n\na"]
    expected = [" c\nd e", " c\nd e", "c\nd e", "c\nd e", " c\nd e"]
    a, b, eos = *tokenizer.encode("a b"), tokenizer.eos_id
    for first in (tokenizer.bos_id, eos):
        given.clear()
        generator = TextGenerator(alphabet.model, tokenizer, 8, first_id=first)
        assert generator.generate(prompts, options) == expected
        assert sorted(given) == sorted([first, *ids] for ids in ([a, b], [a, eos, b], [a, eos], [], [eos, eos, a]))
        assert ["".join(generator.stream(prompt, options)) for prompt in prompts] == expected
    given.clear()
    alphabet.generate(["a"])
    assert given == [[tokenizer.bos_id, a]]


def test_a_character_is_given_out_whole(monkeypatch):
    """What is written byte by byte appears when its last byte is there; bytes that never make one appear at the end."""
    tokenizer = byte_fallback(LINES)
    generator = TextGenerator(random_model(1, vocabulary=tokenizer.size), tokenizer, context=12)
    ids = tokenizer.encode("the 猫 said 🐈!")
    assert len(ids) > len("the 猫 said 🐈!") / 2

    def written(tokens):
        def planned(*arguments):
            yield from ([(0, i)] for i in tokens)

        monkeypatch.setattr("fastformer.apps.language.text_generator.sample", planned)
        return list(generator.stream(""))

    assert "".join(written(ids)) == "the 猫 said 🐈!"
    assert all("\ufffd" not in piece for piece in written(ids))
    assert "猫" in written(ids)
    broken = ids[: ids.index(tokenizer.encode("猫")[-1])]  # ends within the character
    assert tokenizer.decode(broken).endswith("\ufffd")
    assert "".join(written(broken)) == tokenizer.decode(broken)
    assert "".join(written([*broken, *tokenizer.encode("the")])) == tokenizer.decode(
        [*broken, *tokenizer.encode("the")]
    )


def test_pieces_come_as_they_are_written(alphabet):
    """The first before the last is chosen."""
    chosen = []
    hook = alphabet.model.output.register_forward_hook(lambda *_: chosen.append(1))
    try:
        pieces = alphabet.stream("a b", SamplingOptions(temperature=0, max_new_tokens=6, min_new_tokens=6))
        assert not chosen
        assert (next(pieces), len(chosen)) == (" c", 1)
        assert (next(pieces), len(chosen)) == (" d", 2)
        assert len(list(pieces)) == 4
    finally:
        hook.remove()


def test_without_a_seed_texts_differ(generator):
    options = SamplingOptions(max_new_tokens=30, stop_at_eos=False)
    assert generator.generate(["the"], options) != generator.generate(["the"], options)
    seeded = replace(options, seed=1)
    assert generator.generate(["the"], seeded) == generator.generate(["the"], seeded)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    generator.generate(["the"], seeded)
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
    steps = sample(alphabet.model, [ids], options, 8, random_streams([ids], 0), 0)
    assert alphabet.tokenizer.decode([i for [(_, i)] in steps]) == found[0].strip()
    assert found[0] == found[2]
    caplog.clear()
    pieces = alphabet.stream(long, options)
    assert "the last 8 tokens are read" in caplog.text  # before the first piece
    assert "".join(pieces) == found[0]


def test_unknown_words_are_named_and_do_not_stop_anything(alphabet, caplog):
    assert alphabet.unknown_words("a zebra b, zebra") == ["zebra", ","]
    with caplog.at_level(logging.WARNING, "fastformer"):
        texts = alphabet.generate(["b yak zebra", "a zebra", "c"], SamplingOptions(max_new_tokens=2, temperature=0))
    assert [record.getMessage() for record in caplog.records] == ["the model does not know these words: yak, zebra"]
    assert len(texts) == 3
    caplog.clear()
    alphabet.generate([" ".join(f"w{i}" for i in range(13))], SamplingOptions(max_new_tokens=1))
    assert "w9 and 3 more" in caplog.text
    caplog.clear()
    alphabet.generate(["a b"], SamplingOptions(max_new_tokens=1))
    assert not caplog.records


def test_modes_and_gradients_are_as_they_were(alphabet):
    """Of each module apart, whenever a piece is there, and after an error."""
    model = alphabet.model
    flags = {name: name.endswith("norm1") or not name for name, _ in model.named_modules()}
    for name, module in model.named_modules():
        module.training = flags[name]

    def as_before():
        modes = {name: module.training for name, module in model.named_modules()}
        return modes == flags and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()

    def broken(*_):
        raise FloatingPointError("diverged")

    options = SamplingOptions(temperature=0, max_new_tokens=5, min_new_tokens=5)
    try:
        pieces = alphabet.stream("a b", options)
        for piece in (" c", " d"):
            assert next(pieces) == piece
            assert as_before()
        pieces.close()
        assert as_before()
        hook = model.output.register_forward_hook(broken)
        with pytest.raises(FloatingPointError):
            alphabet.generate(["a"], options)
        hook.remove()
        assert as_before()
    finally:
        model.eval()


def test_argument_errors(alphabet):
    with pytest.raises(TypeError, match=r"^prompts must be a list of prompts, not one string$"):
        alphabet.generate("a b")
    with pytest.raises(TypeError, match=r"^prompt must be a string, not list$"):
        alphabet.stream(["a b"])
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
