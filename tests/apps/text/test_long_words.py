"""Long words and long lines in the text that a tokenizer is trained on."""

from pathlib import Path

import pytest

from fastformer.apps.text import load_tokenizer, train_sentencepiece

LINES = [f"the quick brown fox jumps over the lazy dog {i}" for i in range(50)]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char", "word"])
@pytest.mark.parametrize("letter", ["a", "é", "日", "\U0001f600"])
def test_a_very_long_word_leaves_a_tokenizer_that_loads(tmp_path: Path, kind: str, letter: str) -> None:
    lines = [*LINES, "x " + letter * 9000 + " y"]
    tokenizer = train_sentencepiece(lines, 80, model_type=kind)  # type: ignore[arg-type]
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(LINES[0]) == tokenizer.encode(LINES[0])
    assert max(map(len, tokenizer.pieces(range(tokenizer.size)))) <= 1001


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])  # unigram's first candidates depend on the lines
def test_a_long_line_teaches_what_its_words_teach(kind: str) -> None:
    short = train_sentencepiece(LINES * 20, 60, model_type=kind)  # type: ignore[arg-type]
    long = train_sentencepiece([" ".join(LINES * 20)], 60, model_type=kind)  # type: ignore[arg-type]
    assert short.pieces(range(short.size)) == long.pieces(range(long.size))
