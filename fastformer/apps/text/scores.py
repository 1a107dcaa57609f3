"""Scores of translations: sacreBLEU, chrF and exact match, computed on detokenised text only.

BLEU counts words, so it depends on the boundaries of words, which differ by language. `bleu_tokenizer` chooses as
sacrebleu does: `zh`, `ja-mecab`, `ko-mecab`, and `13a` for all other languages; `char` for languages without spaces for
which sacrebleu has no word tokenizer. Scores can be compared only if their signatures are equal (Post 2018, "A call for
clarity in reporting BLEU scores").
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastformer.settings import check_value

# Tokenizers of sacrebleu that need no download.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
# By the first part of a language's name, in ISO 639-1 and 639-3.
_BY_LANGUAGE = {
    "zh": ("zh", "zho", "cmn", "yue"),
    "ja-mecab": ("ja", "jpn"),
    "ko-mecab": ("ko", "kor"),
    "char": ("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"),
}
_NEEDS_SPACES = ("13a", "intl", "none")
_LETTER = re.compile(r"[^\W\d_]")
# Thai, Lao, Tibetan, Myanmar, Khmer, kana, Chinese characters.
_LETTER_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)

logger = logging.getLogger("fastformer")


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF from 0 to 100 with their signatures; exact: share of identical sentences, 0 to 1."""

    bleu: float
    chrf: float
    exact: float
    sentences: int
    bleu_signature: str
    chrf_signature: str

    def __str__(self) -> str:
        return (
            f"BLEU {self.bleu:.2f} ({self.bleu_signature})\n"
            f"chrF {self.chrf:.2f} ({self.chrf_signature})\n"
            f"exact {100 * self.exact:.1f} % of {self.sentences:,} sentences"
        )


def bleu_tokenizer(language: str) -> str:
    """Return the name of sacrebleu's tokenizer for a target language such as `de`, `zh-CN` or `jpn_Jpan`."""
    code = re.split("[-_]", language.lower())[0]
    return next((name for name, codes in _BY_LANGUAGE.items() if code in codes), "13a")


def check_bleu_tokenizer(tokenizer: str) -> None:
    """Raise an error unless a BLEU tokenizer exists and the packages that it needs are installed.

    Raises:
        ValueError: there is no such tokenizer.
        ImportError: it needs a package that is not installed.
    """
    _bleu(tokenizer)


def warn_without_spaces(tokenizer: str, references: Sequence[str]) -> None:
    """Log a warning if a tokenizer splits at spaces and most letters of the references are of scripts without any."""
    text = "".join(references[:1000])
    letters = len(_LETTER_WITHOUT_SPACES.findall(text))
    if tokenizer in _NEEDS_SPACES and 2 * letters > len(_LETTER.findall(text)):
        logger.warning(
            "BLEU says nothing of these references: its tokenizer %s splits words at spaces, and their script has "
            "none; choose another, such as bleu_tokenizer zh or char, or state the target_language",
            tokenizer,
        )


def score_translations(
    translations: Sequence[str], references: Sequence[str], lowercase: bool = False, tokenizer: str = "13a"
) -> Scores:
    """Score detokenised translations against one reference each.

    Args:
        translations: one for each sentence.
        references: one for each sentence.
        lowercase: compare lower-cased text.
        tokenizer: sacrebleu's, for BLEU: one of `BLEU_TOKENIZERS`; see `bleu_tokenizer`.

    Raises:
        ValueError: the numbers of sentences differ, there is none, or there is no such tokenizer.
        ImportError: sacrebleu is not installed (it comes with the extra `apps`), or a package that the tokenizer needs.
    """
    from sacrebleu.metrics import CHRF

    if len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations and {len(references)} references")
    if not references:
        raise ValueError("there is nothing to score")
    bleu, chrf = _bleu(tokenizer, lowercase), CHRF(lowercase=lowercase)
    warn_without_spaces(tokenizer, references)
    same = sum(translation == reference for translation, reference in zip(translations, references, strict=True))
    return Scores(
        bleu.corpus_score(list(translations), [list(references)]).score,
        chrf.corpus_score(list(translations), [list(references)]).score,
        same / len(references),
        len(references),
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )


def _bleu(tokenizer: str, lowercase: bool = False) -> Any:
    from sacrebleu.metrics import BLEU

    check_value("bleu_tokenizer", tokenizer, str, choices=BLEU_TOKENIZERS)
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenizer)
    except RuntimeError:  # MeCab or its dictionary is missing
        extra = tokenizer.partition("-")[0]
        raise ImportError(
            f"BLEU with tokenizer {tokenizer} needs MeCab: pip install 'sacrebleu[{extra}]'; or choose bleu_tokenizer "
            "char"
        ) from None
