"""Sentencepiece and word tokenizers: round trips, special ids, clamping, saving and loading, silence."""

import doctest
import json
import logging
import pickle
from typing import Any

import pytest

from fastformer.apps.text import (
    SPLITTINGS,
    SentencePieceTokenizer,
    SpecialIds,
    TextError,
    Tokenizer,
    WordTokenizer,
    encode_documents,
    encode_source,
    load_tokenizer,
    number_corpus,
    sentencepiece_tokenizer,
    train_sentencepiece,
    word_tokenizer,
)
from fastformer.apps.text.vocabulary import learn_tokenizer
from fastformer.apps.translation.run import DataConfig

LINES = number_corpus("fr", 400, 1, 1)[0].target


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.WARNING, "fastformer")


def learn(kind: str, lines: list[str] = LINES, size: int = 60, **options: Any) -> Tokenizer:
    if kind in SPLITTINGS:
        return WordTokenizer.from_lines(lines, splitting=kind, **options)
    return train_sentencepiece(lines, size, model_type=kind, **options)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char", "word", *SPLITTINGS])
def test_round_trip_and_special_ids(kind, tmp_path):
    tokenizer = learn(kind)
    silent = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    for text in LINES[:50]:
        ids = tokenizer.encode(text)
        assert not set(silent) & set(ids)
        assert all(0 <= i < tokenizer.size for i in ids)
        if tokenizer.unk_id not in ids:
            assert tokenizer.decode(ids) == tokenizer.decode([*silent, *ids, *silent]) == text
    assert tokenizer.encode_batch([*LINES, ""]) == [*map(tokenizer.encode, LINES), []]
    assert (tokenizer.encode_batch([]), tokenizer.decode([])) == ([], "")
    tokenizer.save(tmp_path / "new" / "folder")
    for again in (load_tokenizer(tmp_path / "new" / "folder"), pickle.loads(pickle.dumps(tokenizer))):
        assert (type(again), again.special_ids) == (type(tokenizer), tokenizer.special_ids)
        assert again.encode_batch(LINES) == tokenizer.encode_batch(LINES)


@pytest.mark.parametrize("kind", ["char", "whitespace"])
def test_text_never_becomes_a_special_id(kind):
    """Neither newlines nor what looks like a special symbol: a tutorial had newline tokens in its vocabulary."""
    tokenizer = learn(kind, ["a <pad> <bos>\n", "b <eos> c\r\n", "</s> <s> d"] * 3, size=30)
    assert not any("\n" in word or "\r" in word for word in tokenizer.words)
    silent = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    for text in ("<pad> <bos> <eos>", "<pad>", "a\n", "</s>", "<s>"):
        assert not silent & set(tokenizer.encode(text))
    assert tokenizer.encode("a\nd\n") == tokenizer.encode("a d")


@pytest.mark.parametrize("kind", ["unigram", "punctuation"])
def test_configured_special_ids_and_lower_casing_are_used_and_stored(kind, tmp_path):
    special_ids = SpecialIds(unk_id=3, pad_id=12, bos_id=0, eos_id=7)
    learn(kind, [line.title() for line in LINES], 40, special_ids=special_ids, lowercase=True).save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.unk_id, again.pad_id, again.bos_id, again.eos_id) == (3, 12, 0, 7)
    assert again.decode(again.encode("DEUX")) == "deux"
    assert again.encode("☃")[-1] == again.unk_id


@pytest.mark.parametrize(
    ("normalization", "decoded"), [("identity", "待って…　ＡＢＣ！？"), ("nmt_nfkc", "待って... ABC!?")]
)
def test_identity_keeps_full_width_punctuation(normalization, decoded):
    settings = DataConfig(tokenizer="char", vocabulary=20, normalization=normalization)
    tokenizer = learn_tokenizer(["待って…　ＡＢＣ！？"] * 3, settings)
    assert tokenizer.decode(tokenizer.encode("待って…　ＡＢＣ！？")) == decoded


def test_special_ids_must_be_four_different_ones():
    for wrong in ((0, 1, 2, 0), (0, 1, 2, -1), (0, 1, 2, 3.0), (0, 1, 2, True)):
        with pytest.raises(ValueError, match="four distinct integers >= 0, got unk_id=0, pad_id=1, bos_id=2, eos_id="):
            SpecialIds(*wrong)
    with pytest.raises(ValueError, match="special id 90 is beyond vocabulary_size 50"):
        train_sentencepiece(LINES, 50, special_ids=SpecialIds(eos_id=90))
    with pytest.raises(ValueError, match="special id 90 is beyond the vocabulary"):
        WordTokenizer.from_lines(["a b c"], special_ids=SpecialIds(eos_id=90))


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char", "word"])
def test_a_vocabulary_too_large_is_clamped_with_one_warning(model_type, caplog, capfd):
    tokenizer = train_sentencepiece(LINES, 5000, model_type=model_type)
    (message,) = caplog.messages
    assert "5,000" in message
    assert f"using {tokenizer.size:,}" in message
    largest = train_sentencepiece(LINES, tokenizer.size, model_type=model_type)
    assert largest.model == tokenizer.model
    assert train_sentencepiece(LINES, 5000, model_type=model_type, warns=False).model == tokenizer.model
    assert len(caplog.records) == 1
    assert capfd.readouterr() == ("", "")  # sentencepiece's own log is silent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 9}, "a vocabulary of 9 is too small: .* need 2[0-9]"),
        ({"character_coverage": 9995}, "cannot be trained on these lines: .*character_coverage"),
        ({"lines": []}, "no text to train a tokenizer on"),
        ({"lines": ["", " "]}, "no text to train a tokenizer on"),
        ({"lines": ["\u200b"]}, "cannot be trained on these lines"),
    ],
)
def test_bad_arguments_for_sentencepiece(arguments, message, capfd):
    with pytest.raises(ValueError, match=message) as caught:
        train_sentencepiece(**{"lines": LINES, "vocabulary_size": 50, **arguments})
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


SYMBOLS = ["<unk>", "<pad>", "<bos>", "<eos>"]


@pytest.mark.parametrize("kind", ["unigram", "punctuation"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"not a JSON file"),
        ([], r"it must hold a JSON object, not list"),
        ({"kind": "bert"}, r"\(unknown kind 'bert'\)"),
        ({"special_ids": {"pad_id": 9}}, r"its special ids .* are not those of|the special symbols at their ids"),
        ({"lowercase": "false"}, r"lowercase must be true or false"),
        ({"sha256": "0", "words": [*SYMBOLS, "a", "a"]}, r"sentencepiece\.model is damaged|hold every word once"),
        ({"sha256": 5, "words": [*SYMBOLS, "\ud800"]}, r"sentencepiece\.model is damaged|is not text"),
    ],
)
def test_damaged_tokenizers_are_one_line_errors(tmp_path, kind, change, message):
    learn(kind).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text("{" if change is None else json.dumps(content | change if change else change))
    with pytest.raises(TextError, match=rf"tokenizer\.json: .*({message})") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_files_and_models_are_named(tmp_path):
    learn("unigram").save(tmp_path)
    for name in ("sentencepiece.model", "tokenizer.json"):
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name}: no such file"):
            load_tokenizer(tmp_path)
    for model in (b"", b"something else"):
        with pytest.raises(TextError, match="not a sentencepiece model"):
            SentencePieceTokenizer(model)


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])  # unigram's first candidates depend on the lines
def test_a_long_line_teaches_what_its_words_teach(kind):
    assert learn(kind, LINES * 5).words == learn(kind, [" ".join(LINES * 5)]).words
    assert max(map(len, learn(kind, [*LINES, "x " + "é" * 9000 + " y"], 80).words)) <= 1001


def test_ctrl_c_while_sentencepiece_reads_the_lines_is_not_an_error_of_the_lines(monkeypatch):
    class LongWord:
        def sub(self, _, text):
            if text == LINES[9]:
                raise KeyboardInterrupt
            return text

    monkeypatch.setattr(sentencepiece_tokenizer, "_LONG_WORD", LongWord())
    with pytest.raises(KeyboardInterrupt):
        learn("bpe")


def test_one_string_is_no_list_of_lines():
    words = WordTokenizer.from_lines(LINES)
    takers = [WordTokenizer.from_lines, lambda lines: train_sentencepiece(lines, 40), words.encode_batch]
    takers += [lambda lines: encode_source(lines, words, 9), lambda lines: encode_documents(lines, words)]
    for take in takers:
        with pytest.raises(TypeError, match=r"^lines must be a list of lines, not one string$"):
            take("the cat sat")


def test_word_counts_decide_the_table():
    lines = ["b a b c", "b a d"]
    words = WordTokenizer.from_lines([*lines, "<unk> <eos>"], splitting="whitespace")
    assert words.words == [*SYMBOLS, "b", "a", "c", "d"]
    assert words.decode(words.encode("a x b")) == "a <unk> b"
    assert WordTokenizer.from_lines(lines, minimum_frequency=2).words[4:] == ["b", "a"]
    assert WordTokenizer.from_lines(lines, maximum_size=7).words[4:] == ["b", "a", "c"]
    with pytest.raises(TextError, match="no word occurs 9 times"):
        WordTokenizer.from_lines(lines, minimum_frequency=9)
    with pytest.raises(ValueError, match="splitting must be one of punctuation, whitespace, not 'bert'"):
        WordTokenizer.from_lines(lines, splitting="bert")


@pytest.mark.parametrize(
    "text",
    [
        "A man (aged 45) says: “hello, you!”; isn't that 3.5% of 1,000?",
        "L'homme d’affaires aujourd'hui porte un T-Shirt blanc-cassé.",
        'Zwei junge weiße Männer sind "im Freien" in der Nähe vieler Büsche.',
        "Was ist das? Ein Ball!",
        "Sie sagt: „Ja“, er „nein“, and I “no”.",
        "मैं हिन्दी बोलता हूँ।",
        "اَلْعَرَبِيَّةُ لُغَةٌ، می\u200cخواهم؟",
        "שָׁלוֹם עוֹלָם",
        "Ọjọ́ ń lọ ❤\ufe0f",
    ],
)
def test_detokenised_text_is_the_text(text):
    tokenizer = WordTokenizer.from_lines([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_examples_in_the_docstrings():
    assert word_tokenizer.split_words("cafe\u0301 noir") == ["café", "noir"]  # NFC
    assert doctest.testmod(word_tokenizer) == (0, 2)


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_symbols_are_one_piece_each_and_come_back(model_type, lowercase, tmp_path):
    symbols = ["<2de>", "<2FR>", "<2fr_CA>"]  # the last is in no line of training
    lines = [f"{symbols[i % 2]} {line}" for i, line in enumerate(LINES)]
    train_sentencepiece(lines, 90, model_type=model_type, symbols=symbols, lowercase=lowercase).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for symbol in symbols:
        text = f"{symbol} {LINES[0]}"
        expected = text.lower() if lowercase else text
        ids = tokenizer.encode(text)
        assert [piece for piece in tokenizer.pieces(ids) if "2" in piece] == [expected.split()[0]]
        assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("symbols", ["", "<2de>,", "<2de>,<2de>", "<2 de>", "<pad>,<2de>"])
def test_symbols_that_cannot_be_pieces_are_refused(symbols):
    with pytest.raises(ValueError, match="symbols must be different texts without spaces, separated by commas"):
        DataConfig(symbols=symbols)
