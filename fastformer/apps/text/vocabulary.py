"""Learn the tokenizer that the settings of a run describe, and load a stored one."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import TextError, read_file, read_json
from .sentencepiece_tokenizer import MarianTokenizer, SentencePieceTokenizer, train_sentencepiece
from .tokenizer import BOS, CHECKSUMS, EOS, MODEL_FILE, PAD, PIECES_FILE, TOKENIZER_FILE, UNK, SpecialIds, Tokenizer
from .word_tokenizer import WordTokenizer

VOCABULARY = 8000  # entries of a sentencepiece vocabulary if the settings have none


def learn_tokenizer(lines: Iterable[str], settings: Any, warns: bool = True) -> Tokenizer:
    """Learn the tokenizer that the settings of a run's data describe, from the training text only.

    warns: as in `train_sentencepiece`. Raises the errors of `train_sentencepiece` and `WordTokenizer.from_lines`.
    """
    special_ids = getattr(settings, "special_ids", None)
    if settings.tokenizer == "words":
        return WordTokenizer.from_lines(
            lines,
            minimum_frequency=settings.minimum_frequency,
            maximum_size=settings.vocabulary,
            lowercase=settings.lowercase,
            splitting=settings.splitting,
            special_ids=special_ids,
        )
    return train_sentencepiece(
        lines,
        settings.vocabulary or VOCABULARY,
        model_type=settings.tokenizer,
        character_coverage=settings.character_coverage,
        normalization=settings.normalization,
        special_ids=special_ids,
        lowercase=settings.lowercase,
        symbols=split_symbols(getattr(settings, "symbols", None)),
        warns=warns,
    )


def split_symbols(symbols: str | None) -> list[str]:
    """Return the symbols of a setting such as `<2de>,<2fr>`.

    Raises ``ValueError`` if a symbol is empty, holds a space, occurs twice or is a special token.
    """
    separate = [] if symbols is None else [symbol.strip() for symbol in symbols.split(",")]
    wrong = [each for each in separate if each in ("", UNK, PAD, BOS, EOS) or len(each.split()) != 1]
    if wrong or len(set(separate)) < len(separate):
        raise ValueError(
            "symbols must be different texts without spaces, separated by commas, and no special tokens, "
            f"not {symbols!r}"
        )
    return separate


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a tokenizer of any kind from the folder that `save` wrote.

    Raises ``FileNotFoundError`` if a file is missing and ``TextError`` if one is damaged, naming the file.
    """
    path = Path(folder) / TOKENIZER_FILE
    content = read_json(path)
    try:
        return _load(path.parent, content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise TextError(f"{path}: not a tokenizer file, or damaged ({reason})") from error


def _load(folder: Path, content: dict[str, Any]) -> Tokenizer:
    kind = content["kind"]
    if kind == WordTokenizer.kind:
        special_ids = SpecialIds(**content["special_ids"])
        return WordTokenizer(content["words"], special_ids, content["lowercase"], content["splitting"])
    if kind == MarianTokenizer.kind:
        model, pieces = (_read_stored(folder, name, content) for name in (MODEL_FILE, PIECES_FILE))
        return MarianTokenizer(model, json.loads(pieces))
    if kind != SentencePieceTokenizer.kind:
        raise TextError(f"unknown kind {kind!r}")
    tokenizer = SentencePieceTokenizer(_read_stored(folder, MODEL_FILE, content), content["lowercase"])
    if vars(tokenizer.special_ids) != content["special_ids"]:
        raise TextError(f"{MODEL_FILE}: its special ids {tokenizer.special_ids} are not those of {TOKENIZER_FILE}")
    return tokenizer


def _read_stored(folder: Path, name: str, content: dict[str, Any]) -> bytes:
    data = read_file(folder / name)
    if hashlib.sha256(data).hexdigest() != content[CHECKSUMS[name]]:
        raise TextError(f"{name} is damaged, or not the file that {TOKENIZER_FILE} was written with")
    return data
