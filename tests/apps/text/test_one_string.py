"""One string where a list of lines is wanted is refused: a string is a sequence of strings, its characters."""

from collections.abc import Callable
from typing import Any

import pytest

from fastformer.apps.text import WordTokenizer, encode_documents, encode_source, train_sentencepiece

LINES = ["the cat sat", "the dog ran", "a cat ran"]
WORDS = WordTokenizer.from_lines(LINES)
TAKERS: dict[str, Callable[[Any], Any]] = {
    "words": WordTokenizer.from_lines,
    "pieces": lambda lines: train_sentencepiece(lines, 25),
    "batch of words": WORDS.encode_batch,
    "batch of pieces": lambda lines: train_sentencepiece(LINES, 25).encode_batch(lines),
    "source": lambda lines: encode_source(lines, WORDS, 9),
    "documents": lambda lines: encode_documents(lines, WORDS),
}


@pytest.mark.parametrize("name", TAKERS)
def test_one_string_is_no_list_of_lines(name: str) -> None:
    TAKERS[name](LINES)
    with pytest.raises(TypeError, match=r"^lines must be a list of lines, not one string$"):
        TAKERS[name]("the cat sat")
