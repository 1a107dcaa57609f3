"""Text to ids and back: the `Tokenizer` protocol, sentencepiece, and loading from a folder.

Sentencepiece is trained in memory on exactly the lines it is given, so validation text cannot slip in through a
folder or a concatenated file. Nothing is sampled and the number of threads is an argument, so the same lines give the
same model; draw a sample with `files.sample_lines` when a corpus is large. A saved tokenizer is two files without
pickle: the sentencepiece model and a JSON file with the special ids, the casing and the model's checksum.
"""

import hashlib
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import sentencepiece

from fastformer.apps.system.files import write_file
from fastformer.settings import check_value

from .files import TextError, check_texts, encode_text, read_json
from .marian import MarianTokenizer
from .special_ids import BOS, EOS, PAD, UNK, SpecialIds, WithSpecialIds
from .vocabulary import WordTokenizer

ModelType = Literal["unigram", "bpe", "char", "word"]
_MODEL_TYPES = ("unigram", "bpe", "char", "word")
_MODEL_FILE = "sentencepiece.model"
# Unigram's training is quadratic in a line, 18 s of CPU for 200,000 characters, so long ones are trained on in parts,
# as no piece reaches across words. And sentencepiece does not read its own model with a piece of 8,000 bytes.
_LONG_WORD = re.compile(r"\S{1000}(?=\S)")
_PART_OF_LINE = re.compile(r".{1,4000}(?=\s|\Z)", re.DOTALL)
_SILENT = 2  # sentencepiece's minloglevel: errors only, and those arrive as exceptions

logger = logging.getLogger("fastformer")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""

    @property
    def special_ids(self) -> SpecialIds:
        """The four special ids as one value."""

    @property
    def unk_id(self) -> int:
        """The id of an unknown piece or word."""

    @property
    def pad_id(self) -> int:
        """The id of padding."""

    @property
    def bos_id(self) -> int:
        """The id that starts the decoder's input."""

    @property
    def eos_id(self) -> int:
        """The id that ends a source and a target sentence."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special ids added."""

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """`encode` of every line, faster."""

    def decode(self, ids: Iterable[int]) -> str:
        """The detokenised text; padding, bos and eos are dropped."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The piece or word behind each id, special ones included."""

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into a folder."""


class SentencePieceTokenizer(WithSpecialIds):
    """A trained sentencepiece model and its special ids; see `train_sentencepiece` and `load_tokenizer`.

    `model` is the serialised model. Raises ``TextError`` when it is none, or when its special ids are not all set.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, lowercase: bool = False) -> None:
        if not model:
            raise TextError("not a sentencepiece model: it is empty")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise TextError("not a sentencepiece model") from error
        self.model = model
        self.lowercase = lowercase
        self._processor = processor
        try:
            self.special_ids = SpecialIds(
                processor.unk_id(), processor.pad_id(), processor.bos_id(), processor.eos_id()
            )
        except ValueError as error:
            raise TextError(f"the sentencepiece model lacks a special symbol: {error}") from None

    def __reduce__(self) -> tuple[type["SentencePieceTokenizer"], tuple[bytes, bool]]:
        return SentencePieceTokenizer, (self.model, self.lowercase)

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces, no special ids added; `<pad>` and the like in the text are plain characters."""
        ids: list[int] = self._processor.encode(text.lower() if self.lowercase else text)
        return ids

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """`encode` of every line by sentencepiece's own threads."""
        check_texts("lines", lines)
        if self.lowercase:
            lines = [line.lower() for line in lines]
        ids: list[list[int]] = self._processor.encode(list(lines))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The detokenised text; padding, bos and eos are dropped, unk shows as U+2047 between spaces."""
        text: str = self._processor.decode([int(i) for i in ids])  # control symbols decode to nothing
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The piece behind each id, for labels on attention maps."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def save(self, folder: str | Path) -> None:
        """Write `sentencepiece.model` and `tokenizer.json` into the folder, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / _MODEL_FILE, self.model)
        content = {
            "kind": self.kind,
            "special_ids": vars(self.special_ids),
            "lowercase": self.lowercase,
            "size": self.size,
            "sha256": hashlib.sha256(self.model).hexdigest(),
        }
        write_file(folder / "tokenizer.json", json.dumps(content, indent=2).encode("utf-8"))


def learn_tokenizer(
    lines: Iterable[str], settings: Any, special_ids: SpecialIds | None = None, pieces: int = 8000
) -> Tokenizer:
    """Learn the vocabulary that the settings of a run's data ask for.

    Args:
        lines: the training text, and nothing else.
        settings: `tokenizer` ("words" or a type of sentencepiece's models), `vocabulary`, `lowercase`; `splitting` and
            `minimum_frequency` of words, `character_coverage` and, of translation, `symbols` of pieces.
        special_ids: None: the usual ones.
        pieces: entries of sentencepiece's vocabulary where the settings do not say.

    Raises as `train_sentencepiece` and `WordTokenizer.from_lines` do.
    """
    common = {"lowercase": settings.lowercase, "special_ids": special_ids}
    if settings.tokenizer == "words":
        return WordTokenizer.from_lines(
            lines,
            minimum_frequency=settings.minimum_frequency,
            maximum_size=settings.vocabulary,
            splitting=settings.splitting,
            **common,
        )
    return train_sentencepiece(
        lines,
        settings.vocabulary or pieces,
        model_type=settings.tokenizer,
        character_coverage=settings.character_coverage,
        symbols=split_symbols(getattr(settings, "symbols", None)),
        **common,
    )


def split_symbols(symbols: str | None) -> list[str]:
    """Return the symbols of a setting such as `<2de>,<2fr>`.

    Raises:
        ValueError: one is empty, holds a space, is there twice or is a special token.
    """
    found = [] if symbols is None else [symbol.strip() for symbol in symbols.split(",")]
    wrong = [each for each in found if each in ("", UNK, PAD, BOS, EOS) or len(each.split()) != 1]
    if wrong or len(set(found)) < len(found):
        raise ValueError(
            "symbols must be different texts without spaces, separated by commas, and no special tokens, "
            f"not {symbols!r}"
        )
    return found


def train_sentencepiece(
    lines: Iterable[str],
    vocabulary_size: int,
    *,
    model_type: ModelType = "unigram",
    character_coverage: float = 1.0,
    special_ids: SpecialIds | None = None,
    lowercase: bool = False,
    threads: int = 2,
    symbols: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """Train sentencepiece in memory on the given lines: give it the training split only, or both sides for a joint one.

    A vocabulary larger than the lines allow is clamped to the largest possible one, with a warning on the logger
    ``fastformer`` that gives both sizes. The result depends on nothing but the arguments. A word of more than 1,000
    characters counts as several. Each of the `symbols`, such as `<2de>`, is always one piece.

    Raises ``ValueError`` for a wrong argument, and ``TextError`` when there is no text or `vocabulary_size` is too
    small for the characters that must be covered.
    """
    check_texts("lines", lines)
    check_value("model_type", model_type, str, choices=_MODEL_TYPES)
    check_value("vocabulary_size", vocabulary_size, int, at_least=5)  # four special symbols and a piece
    check_value("character_coverage", character_coverage, float, at_least=0.98, at_most=1)
    check_value("lowercase", lowercase, bool)
    if symbols and model_type == "word":
        raise ValueError("symbols are for model_type unigram, bpe and char; in a word model, every word is one piece")
    special_ids = (special_ids or SpecialIds()).distinct()
    if (highest := max(special_ids.names())) >= vocabulary_size:
        raise ValueError(f"special id {highest} is beyond vocabulary_size {vocabulary_size}")
    texts = [text for line in lines if (text := line.lower() if lowercase else line).strip()]
    if not texts:
        raise TextError("no text to train a tokenizer on: every line is empty")
    options: dict[str, Any] = {
        "model_type": model_type,
        "character_coverage": character_coverage,
        "num_threads": threads,
        # The default, 4,192 bytes, silently leaves longer lines out.
        "max_sentence_length": max(4192, max(map(len, _encoded(texts))) + 1),
        "minloglevel": _SILENT,
        "user_defined_symbols": [symbol.lower() if lowercase else symbol for symbol in symbols],
        "unk_piece": UNK,
        "pad_piece": PAD,
        "bos_piece": BOS,
        "eos_piece": EOS,
        **vars(special_ids),
    }
    parts = [part for text in texts for part in _PART_OF_LINE.findall(_LONG_WORD.sub(r"\g<0> ", text))]
    model = _train(parts, vocabulary_size, options)
    tokenizer = SentencePieceTokenizer(model, lowercase)
    if tokenizer.size < vocabulary_size:
        logger.warning(
            "vocabulary_size %s is more than these %s lines allow for a %s model: using %s",
            *(f"{vocabulary_size:,}", f"{len(texts):,}", model_type, f"{tokenizer.size:,}"),
        )
    return tokenizer


def _encoded(texts: Iterable[str]) -> Iterator[bytes]:
    return (encode_text(text, f"line {number:,} that is not blank") for number, text in enumerate(texts, start=1))


def _train(texts: Sequence[str], vocabulary_size: int, options: dict[str, Any]) -> bytes:
    """One training run, and a second at the maximum that sentencepiece names when the first asked for too much."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=model, vocab_size=vocabulary_size, **options
        )
    except RuntimeError as error:
        if found := re.search(r"Vocabulary size too high .* <= (\d+)", str(error)):
            return _train(texts, int(found[1]), options)
        if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise TextError(
                f"vocabulary_size {vocabulary_size} is too small: the characters of these lines and the special "
                f"symbols need {found[1]}; raise it, or lower character_coverage"
            ) from None
        raise TextError(f"sentencepiece cannot be trained on these lines: {error}") from error
    return model.getvalue()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load what a tokenizer's `save` wrote.

    Raises ``FileNotFoundError`` when a file is missing and ``TextError`` when one is damaged, naming the file.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the folder holds no tokenizer")
    content = read_json(path)
    try:
        kind = content["kind"]
        if kind == WordTokenizer.kind:
            return WordTokenizer.from_json(content)
        if kind == MarianTokenizer.kind:
            return MarianTokenizer.load(folder, content)
        checksum, lowercase = content["sha256"], content["lowercase"]
        special_ids = SpecialIds(**content["special_ids"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TextError(f"{path}: not a tokenizer file, or damaged ({error!r})") from error
    if not isinstance(lowercase, bool):
        raise TextError(f"{path}: lowercase must be true or false, not {lowercase!r}")
    if kind != SentencePieceTokenizer.kind:
        raise TextError(f"{path}: unknown kind {kind!r}; known are sentencepiece, word and marian")
    path = folder / _MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; the tokenizer is incomplete")
    model = path.read_bytes()
    if hashlib.sha256(model).hexdigest() != checksum:
        raise TextError(f"{path}: damaged, or not the model that tokenizer.json was written with")
    tokenizer = SentencePieceTokenizer(model, lowercase)
    if tokenizer.special_ids != special_ids:
        raise TextError(f"{path}: its special ids {tokenizer.special_ids} are not those of tokenizer.json")
    return tokenizer
