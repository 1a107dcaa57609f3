"""`Tokenizer`, which turns text into ids and back; `SpecialIds`; and the files of stored tokenizers."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from fastformer.apps.system.files import write_file
from fastformer.settings import check_value

from .files import check_texts

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
TOKENIZER_FILE, MODEL_FILE, PIECES_FILE = "tokenizer.json", "sentencepiece.model", "vocabulary.json"
CHECKSUMS = {MODEL_FILE: "sha256", PIECES_FILE: "vocabulary_sha256"}  # their names in tokenizer.json


@dataclass(frozen=True)
class SpecialIds:
    """The ids of `<unk> <pad> <bos> <eos>`, which differ between pretrained models; they are stored with a tokenizer.

    Raises ``ValueError`` unless they are distinct integers >= 0; only `pad_id` may equal `bos_id`, as in Marian's
    models.
    """

    unk_id: int = 0
    pad_id: int = 1
    bos_id: int = 2
    eos_id: int = 3

    def __post_init__(self) -> None:
        self._check(3 if self.pad_id == self.bos_id else 4)

    def _check(self, distinct: int) -> None:
        ids = vars(self)
        if any(type(i) is not int or i < 0 for i in ids.values()) or len({*ids.values()}) < distinct:
            values = ", ".join(f"{name}={value!r}" for name, value in ids.items())
            raise ValueError(f"special ids must be four distinct integers >= 0, got {values}")

    def distinct(self) -> Self:
        """Return the ids for a vocabulary to be learned; raises ``ValueError`` if `pad_id` equals `bos_id`."""
        self._check(4)
        return self

    def names(self) -> dict[int, str]:
        """Return the symbol of each special id."""
        return {self.unk_id: UNK, self.pad_id: PAD, self.bos_id: BOS, self.eos_id: EOS}

    def drop(self, ids: Iterable[int]) -> list[int]:
        """Return the ids without padding, bos and eos; unk stays, because it stands for a word."""
        silent = {self.pad_id, self.bos_id, self.eos_id}
        return [i for i in map(int, ids) if i not in silent]


class Tokenizer:
    """The base of all tokenizers.

    Attributes:
        words: the word or piece of each id, special symbols included.
        special_ids: the special ids; also as `unk_id`, `pad_id`, `bos_id` and `eos_id`.
        lowercase: whether text is lower-cased before it is encoded.
    """

    kind: ClassVar[str]

    def __init__(self, words: Sequence[str], special_ids: SpecialIds, lowercase: bool = False) -> None:
        self.words = list(words)
        self.special_ids, self.lowercase = special_ids, check_value("lowercase", lowercase, bool)
        self.unk_id, self.pad_id = special_ids.unk_id, special_ids.pad_id
        self.bos_id, self.eos_id = special_ids.bos_id, special_ids.eos_id

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, no special ids added; unknown pieces or words give `unk_id`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of every line as `encode` does, faster."""
        return self._encode(self._prepared(lines))

    def sample_batch(self, lines: Sequence[str], alpha: float) -> list[list[int]]:
        """Return ids of pieces drawn at random; see `SentencePieceTokenizer.sample_batch`."""
        raise ValueError(f"sampling needs a SentencePieceTokenizer, not {type(self).__name__}")

    def _prepared(self, lines: Sequence[str]) -> list[str]:
        check_texts("lines", lines)
        return [line.lower() for line in lines] if self.lowercase else list(lines)

    def _encode(self, lines: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding, bos and eos are dropped."""
        raise NotImplementedError

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the piece or word behind each id, special ones included."""
        return [self.words[int(i)] for i in ids]

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder, which is created if it does not exist: tokenizer.json is last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content, files = self._stored()
        for name, data in files.items():
            write_file(folder / name, data)
            content[CHECKSUMS[name]] = hashlib.sha256(data).hexdigest()
        write_file(folder / TOKENIZER_FILE, json_bytes({"kind": self.kind, **content}))

    def _stored(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the settings for tokenizer.json, and the content of other files by name; see `load_tokenizer`."""
        raise NotImplementedError


def json_bytes(content: Any) -> bytes:
    """Return JSON with an entry a line."""
    return json.dumps(content, ensure_ascii=False, indent=0).encode("utf-8")
