"""Words of any length and any number of marks take time in proportion, and leave a tokenizer that loads."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.apps.text import load_tokenizer, train_sentencepiece
from fastformer.apps.text.vocabulary import _WORD, split_words

LINES = [f"the quick brown fox jumps over the lazy dog {i}" for i in range(50)]
# Marks of several combining classes, one that decomposes, one of class 0, precomposed letters, a sign.
MARKS = "\u0301\u0323\u0327\u0345\u0344\u0fb3\u3099\u1dce\u20dd\u034f"


def seconds(act: Callable[[], object]) -> float:
    began = process_time()
    act()
    return process_time() - began


@settings(deadline=None, max_examples=200)
@given(st.text(MARKS, min_size=60, max_size=200), st.sampled_from(["", "a", "\u1e69", "!", "\uac00"]), st.booleans())
def test_marks_in_any_order_are_normalised_as_ever(marks: str, start: str, twice: bool) -> None:
    text = f"x {start}{marks}" + (f"o{marks[::-1]} end" if twice else "")
    assert split_words(text) == _WORD.findall(unicodedata.normalize("NFC", text))


def test_marks_take_time_in_proportion() -> None:
    text = "a" + "\u0301\u0323" * 100_000
    assert seconds(lambda: split_words(text)) < 2  # sorted by Python's insertion: 39 s


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char", "word"])
@pytest.mark.parametrize("letter", ["a", "é", "日", "\U0001f600"])
def test_a_very_long_word_leaves_a_tokenizer_that_loads(tmp_path: Path, kind: str, letter: str) -> None:
    lines = [*LINES, "x " + letter * 9000 + " y"]
    tokenizer = train_sentencepiece(lines, 80, model_type=kind)  # type: ignore[arg-type]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(LINES[0]) == tokenizer.encode(LINES[0])
    assert max(map(len, tokenizer.pieces(range(tokenizer.size)))) <= 1001


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("line", ["a" * 200_000, "the quick " * 20_000], ids=["one word", "one line"])
def test_long_lines_are_learned_in_proportion(line: str, kind: str) -> None:
    taken = seconds(lambda: train_sentencepiece([*LINES, line], 60, model_type=kind))  # type: ignore[arg-type]
    assert taken < 4  # unigram, in one piece: 18 to 24 s


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])  # unigram's first candidates depend on the lines
def test_a_long_line_teaches_what_its_words_teach(kind: str) -> None:
    short = train_sentencepiece(LINES * 20, 60, model_type=kind)  # type: ignore[arg-type]
    long = train_sentencepiece([" ".join(LINES * 20)], 60, model_type=kind)  # type: ignore[arg-type]
    assert short.pieces(range(short.size)) == long.pieces(range(long.size))
