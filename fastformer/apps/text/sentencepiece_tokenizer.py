"""`SentencePieceTokenizer`, and its training in memory on exactly the given lines; `MarianTokenizer`."""

import io
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import sentencepiece

from .files import TextError, check_texts, encode_text, read_file, read_json
from .tokenizer import BOS, EOS, MODEL_FILE, PAD, PIECES_FILE, UNK, SpecialIds, Tokenizer, json_bytes

ModelType = Literal["unigram", "bpe", "char", "word"]
Normalization = Literal["nmt_nfkc", "identity"]
NORMALIZATIONS: tuple[Normalization, ...] = get_args(Normalization)
# Training of unigram models is quadratic in a line, 18 s of CPU for 200,000 characters, so long lines are divided; no
# piece crosses words. And sentencepiece cannot read a model of its own with a piece of 8,000 bytes.
_LONG_WORD = re.compile(r"\S{1000}(?=\S)")
_LINE_SEGMENT = re.compile(r".{1,4000}(?=\s|\Z)", re.DOTALL)
_SILENT = 2  # sentencepiece's minloglevel: errors only, and those arrive as exceptions

_LANGUAGE_CODE = re.compile(r">>.*?<<|", re.DOTALL)
_MARIAN_SYMBOLS = ("<unk>", "<pad>", "</s>")

logger = logging.getLogger("fastformer")


def _open_model(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Open a serialised sentencepiece model; raises ``TextError`` if it is not one."""
    try:
        if model:
            return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, OSError) as error:
        raise TextError("not a sentencepiece model") from error
    raise TextError("not a sentencepiece model: it is empty")


class SentencePieceTokenizer(Tokenizer):
    """A trained sentencepiece model and its special ids; see `train_sentencepiece` and `load_tokenizer`.

    Raises ``TextError`` if `model` is no serialised model, or not all of its special ids are set.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, lowercase: bool = False) -> None:
        self.model = model
        self._processor = processor = _open_model(model)
        try:
            special_ids = SpecialIds(processor.unk_id(), processor.pad_id(), processor.bos_id(), processor.eos_id())
        except ValueError as error:
            raise TextError(f"the sentencepiece model lacks a special symbol: {error}") from None
        super().__init__(processor.id_to_piece(list(range(processor.get_piece_size()))), special_ids, lowercase)

    def _encode(self, lines: list[str]) -> list[list[int]]:
        """Return the ids of every line, by sentencepiece's threads; `<pad>` and the like are plain characters."""
        ids: list[list[int]] = self._processor.encode(lines)
        return ids

    def sample_batch(self, lines: Sequence[str], alpha: float) -> list[list[int]]:
        """Return ids of pieces drawn at random, of bpe and unigram models, by the generator that `seed_sampling` seeds.

        alpha: the share of merges that BPE leaves out; or the exponent of the probabilities of a unigram model, whose
        draws are the more uniform, the smaller it is.
        """
        ids: list[list[int]] = self._processor.encode(
            self._prepared(lines), enable_sampling=True, nbest_size=-1, alpha=alpha, num_threads=1
        )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding, bos and eos are dropped, unk shows as U+2047 between spaces."""
        text: str = self._processor.decode([int(i) for i in ids])  # control symbols decode to nothing
        return text

    def _stored(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        settings = {"special_ids": vars(self.special_ids), "lowercase": self.lowercase, "size": self.size}
        return settings, {MODEL_FILE: self.model}


def warn_of_salted_sampling() -> None:
    """Log a warning if sentencepiece's generator ignores its seed in another process: from version 0.2.2 on."""
    version = sentencepiece.__version__
    if tuple(int(number) for number in version.split(".")[:3]) >= (0, 2, 2):
        logger.warning(
            "sentencepiece %s draws other pieces in each process: a resumed run will not equal an uninterrupted one; "
            "for that install sentencepiece 0.2.0",
            version,
        )


def seed_sampling(seed: int, epoch: int) -> None:
    """Seed sentencepiece's generator of this thread; see `warn_of_salted_sampling`."""
    sentencepiece.set_random_generator_seed(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))


def train_sentencepiece(
    lines: Iterable[str],
    vocabulary_size: int,
    *,
    model_type: ModelType = "unigram",
    character_coverage: float = 1.0,
    normalization: Normalization = "nmt_nfkc",
    special_ids: SpecialIds | None = None,
    lowercase: bool = False,
    symbols: Sequence[str] = (),
    warns: bool = True,
) -> SentencePieceTokenizer:
    """Train sentencepiece in memory on the given lines: the training split only, or both sides for a joint vocabulary.

    A vocabulary larger than the lines allow is reduced to the largest possible one; with `warns`, a warning on the
    logger ``fastformer`` names both sizes. The result depends on the arguments only. A word of more than 1,000
    characters counts as several. Each of the `symbols`, such as `<2de>`, is always one piece.

    normalization: "nmt_nfkc" turns full-width and other compatibility characters into plain ones, in decoded text too;
    "identity" changes no character.

    Raises ``ValueError`` for a special id that is not below `vocabulary_size`, and ``TextError`` if there is no text,
    `vocabulary_size` is too small for the characters to cover, or sentencepiece refuses an argument.
    """
    check_texts("lines", lines)
    special_ids = (special_ids or SpecialIds()).distinct()
    if (highest := max(special_ids.names())) >= vocabulary_size:
        raise ValueError(f"special id {highest} is beyond vocabulary_size {vocabulary_size}")
    texts = [text for line in lines if (text := line.lower() if lowercase else line).strip()]
    if not texts:
        raise TextError("no text to train a tokenizer on: every line is empty")
    longest = max(len(encode_text(text, f"line {i:,} that is not blank")) for i, text in enumerate(texts, start=1))
    segments = (each for text in texts for each in _LINE_SEGMENT.findall(_LONG_WORD.sub(r"\g<0> ", text)))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=segments,
            model_writer=model,
            vocab_size=vocabulary_size,
            hard_vocab_limit=False,  # a vocabulary that is too large becomes the largest possible one
            model_type=model_type,
            character_coverage=character_coverage,
            normalization_rule_name=normalization,
            num_threads=2,
            max_sentence_length=max(4192, longest + 1),  # sentencepiece silently skips lines beyond its default
            minloglevel=_SILENT,
            user_defined_symbols=[symbol.lower() if lowercase else symbol for symbol in symbols],
            unk_piece=UNK,
            pad_piece=PAD,
            bos_piece=BOS,
            eos_piece=EOS,
            **vars(special_ids),
        )
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # Ctrl-C while sentencepiece reads the lines
            raise KeyboardInterrupt from None
        if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise TextError(
                f"a vocabulary of {vocabulary_size} is too small: the characters of these lines and the special "
                f"symbols need {match[1]}; raise it, or lower character_coverage"
            ) from None
        raise TextError(f"sentencepiece cannot be trained on these lines: {error}") from error
    tokenizer = SentencePieceTokenizer(model.getvalue(), lowercase)
    if warns and tokenizer.size < vocabulary_size:
        logger.warning(
            "a vocabulary of %s is more than these %s lines allow for a %s model: using %s",
            *(f"{vocabulary_size:,}", f"{len(texts):,}", model_type, f"{tokenizer.size:,}"),
        )
    return tokenizer


class MarianTokenizer(Tokenizer):
    """The tokenizer of one side of Marian's models as transformers stores them; see `read_marian`.

    A sentencepiece model splits text into pieces, whose ids are of a list that both sides may share. The decoder begins
    with padding, so `bos_id` is `pad_id`. A language code such as `>>fra<<` at the beginning of a text is one token.

    `words` has every piece, by id. Raises ``TextError`` for a `model` that is none, and if a special piece is missing.
    """

    kind = "marian"

    def __init__(self, model: bytes, words: Sequence[str]) -> None:
        self._processor = _open_model(model)
        encode_text("".join(words), "the vocabulary")
        self.model = model
        self._ids = {word: i for i, word in enumerate(words)}
        if missing := [word for word in _MARIAN_SYMBOLS if word not in self._ids]:
            raise TextError(f"the vocabulary has no {', '.join(missing)}")
        unk, pad, eos = (self._ids[word] for word in _MARIAN_SYMBOLS)
        super().__init__(words, SpecialIds(unk, pad, pad, eos))

    def _encode(self, lines: list[str]) -> list[list[int]]:
        codes = [_LANGUAGE_CODE.match(line)[0] for line in lines]  # type: ignore[index]
        texts = [line.removeprefix(code) for code, line in zip(codes, lines, strict=True)]
        return [
            [self._ids.get(piece, self.unk_id) for piece in ([code, *pieces] if code else pieces)]
            for code, pieces in zip(codes, self._processor.encode(texts, out_type=str), strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the detokenised text; padding and eos are dropped, unk shows as U+2047 between spaces."""
        text: str = self._processor.decode(self.pieces(self.special_ids.drop(ids)))
        return text.replace("\u2581", " ").strip()  # sentencepiece leaves U+2581 in pieces of the other side

    def _stored(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return {"size": self.size}, {MODEL_FILE: self.model, PIECES_FILE: json_bytes(self.words)}


def read_marian(folder: Path | str) -> tuple[MarianTokenizer, MarianTokenizer]:
    """Read the source and target tokenizers from a folder that transformers' `MarianTokenizer` wrote.

    Raises ``FileNotFoundError`` if a file is missing, and ``TextError`` if one is damaged or of another format.
    """
    folder = Path(folder)
    source, target = (read_file(folder / name) for name in ("source.spm", "target.spm"))
    settings = folder / "tokenizer_config.json"
    separate = settings.is_file() and read_json(settings).get("separate_vocabs", False)
    target_pieces = "target_vocab.json" if separate else "vocab.json"
    return _read_side(source, folder / "vocab.json"), _read_side(target, folder / target_pieces)


def _read_side(model: bytes, vocabulary: Path) -> MarianTokenizer:
    ids = read_json(vocabulary)
    if sorted(ids.values(), key=repr) != sorted(range(len(ids)), key=repr):
        raise TextError(f"{vocabulary}: not a vocabulary: the pieces' ids must be 0 to N - 1, each once")
    try:
        return MarianTokenizer(model, sorted(ids, key=ids.__getitem__))
    except TextError as error:
        raise TextError(f"{vocabulary}, or its model: {error}") from None
