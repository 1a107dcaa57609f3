"""`MarianTokenizer`, for Marian's models as transformers stores them: sentencepiece's pieces with ids from a JSON file.

A sentencepiece model for each side splits text into pieces; `vocab.json`, mostly one for both sides, has their ids. The
decoder begins with padding, so `bos_id` is `pad_id`. A language code such as `>>fra<<` at the beginning of a text is
one token.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .files import TextError, encode_text, read_json
from .sentencepiece_tokenizer import open_model
from .tokenizer import MODEL_FILE, PIECES_FILE, SpecialIds, Tokenizer, json_bytes, read_stored

_CODE = re.compile(r">>.*?<<|", re.DOTALL)
_SPACE = "\u2581"
_UNK, _PAD, _EOS = "<unk>", "<pad>", "</s>"


class MarianTokenizer(Tokenizer):
    """The tokenizer of one side.

    Args:
        model: serialised sentencepiece model.
        words: every piece, by id.

    Raises:
        TextError: `model` is no sentencepiece model, the pieces are no texts, or a special token is missing.
    """

    kind = "marian"

    def __init__(self, model: bytes, words: Sequence[str]) -> None:
        self._processor = open_model(model)
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise TextError("the vocabulary must be a list of pieces")
        encode_text("".join(words), "the vocabulary")
        self.model, self.words = model, list(words)
        self._ids = {word: i for i, word in enumerate(self.words)}
        if missing := [word for word in (_UNK, _EOS, _PAD) if word not in self._ids]:
            raise TextError(f"the vocabulary has no {', '.join(missing)}")
        unk, pad, eos = (self._ids[word] for word in (_UNK, _PAD, _EOS))
        super().__init__(SpecialIds(unk, pad, pad, eos))

    @property
    def size(self) -> int:
        return len(self.words)

    def _encode(self, lines: Sequence[str]) -> list[list[int]]:
        codes = [_CODE.match(line)[0] for line in lines]  # type: ignore[index]
        texts = [line.removeprefix(code) for code, line in zip(codes, lines, strict=True)]
        return [
            [self._ids.get(piece, self.unk_id) for piece in ([code, *pieces] if code else pieces)]
            for code, pieces in zip(codes, self._processor.encode(texts, out_type=str), strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding and eos are dropped, unk shows as U+2047 between spaces."""
        text: str = self._processor.decode(self.pieces(self.special_ids.drop(ids)))
        return text.replace(_SPACE, " ").strip()  # sentencepiece leaves U+2581 in pieces of the other side

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.words[int(i)] for i in ids]

    def _stored(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return {"size": self.size}, {MODEL_FILE: self.model, PIECES_FILE: json_bytes(self.words)}

    @classmethod
    def load(cls, folder: Path, content: Any) -> "MarianTokenizer":
        model, words = (read_stored(folder, name, content) for name in (MODEL_FILE, PIECES_FILE))
        return cls(model, json.loads(words))


def read_marian(folder: Path | str) -> tuple[MarianTokenizer, MarianTokenizer]:
    """Read the source and target tokenizers from a folder that transformers' `MarianTokenizer` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        TextError: a file is damaged or of another format.
    """
    folder = Path(folder)
    for name in ("source.spm", "target.spm", "vocab.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: no such file; the folder holds no tokenizers of Marian")
    settings = folder / "tokenizer_config.json"
    content = read_json(settings) if settings.is_file() else {}
    if not isinstance(content, dict):
        raise TextError(f"{settings}: not the settings of a tokenizer, but of type {type(content).__name__}")
    vocabulary = "target_vocab.json" if content.get("separate_vocabs", False) else "vocab.json"
    return _read_side(folder, "source.spm", "vocab.json"), _read_side(folder, "target.spm", vocabulary)


def _read_side(folder: Path, model: str, vocabulary: str) -> MarianTokenizer:
    content = read_json(folder / vocabulary)
    if not isinstance(content, dict) or sorted(content.values(), key=repr) != sorted(range(len(content)), key=repr):
        raise TextError(f"{folder / vocabulary}: not a vocabulary: the pieces' ids must be 0 to N - 1, each once")
    try:
        return MarianTokenizer((folder / model).read_bytes(), sorted(content, key=content.__getitem__))
    except TextError as error:
        raise TextError(f"{folder / model}, {folder / vocabulary}: {error}") from None
