"""`Tokenizer`, the protocol of all tokenizers, and functions that write and read the files of tokenizers."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import sentencepiece

from fastformer.apps.system.files import write_file

from .files import TextError
from .special_ids import SpecialIds

TOKENIZER_FILE, MODEL_FILE = "tokenizer.json", "sentencepiece.model"


@runtime_checkable
class Tokenizer(Protocol):
    """The protocol of tokenizers. `special_ids` holds the four special ids."""

    special_ids: SpecialIds

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""
        raise NotImplementedError

    @property
    def unk_id(self) -> int:
        """The id of an unknown piece or word."""
        return self.special_ids.unk_id

    @property
    def pad_id(self) -> int:
        """The id of padding."""
        return self.special_ids.pad_id

    @property
    def bos_id(self) -> int:
        """The id that starts the decoder's input."""
        return self.special_ids.bos_id

    @property
    def eos_id(self) -> int:
        """The id that ends a source and a target sentence."""
        return self.special_ids.eos_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, no special ids added; unknown pieces or words give `unk_id`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of every line as `encode` does, faster."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding, bos and eos are dropped."""
        raise NotImplementedError

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the piece or word behind each id, special ones included."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into the folder, which is created if it does not exist."""
        raise NotImplementedError


def open_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Open a serialised sentencepiece model; raises ``TextError`` if it is not one."""
    try:
        if model:
            return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError) as error:
        raise TextError("not a sentencepiece model") from error
    raise TextError("not a sentencepiece model: it is empty")


def checksum(data: bytes) -> str:
    """Return the SHA-256 of a tokenizer's file."""
    return hashlib.sha256(data).hexdigest()


def write_tokenizer(folder: str | Path, content: dict[str, Any], files: dict[str, bytes] | None = None) -> None:
    """Write a tokenizer's files, then tokenizer.json with `content`, which holds a checksum for each file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (files or {}).items():
        write_file(folder / name, data)
    indent = 0 if "words" in content else 2
    text = json.dumps(content, ensure_ascii=indent == 2, indent=indent)
    write_file(folder / TOKENIZER_FILE, text.encode("utf-8"))


def read_checked(path: Path, expected: str) -> bytes:
    """Return the content of a tokenizer's file.

    Raises:
        FileNotFoundError: there is no such file.
        TextError: its checksum is not `expected`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the tokenizer is incomplete")
    data = path.read_bytes()
    if checksum(data) != expected:
        raise TextError(f"{path.name} is damaged, or not the file that {TOKENIZER_FILE} was written with")
    return data
