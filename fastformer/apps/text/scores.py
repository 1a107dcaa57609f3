"""Scores of translations: sacreBLEU, chrF and exact match, computed on detokenised text only.

BLEU counts words, whose boundaries differ by language. Scores can be compared only if their signatures are equal (Post
2018, "A call for clarity in reporting BLEU scores").
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastformer.settings import check_value

# Tokenizers of sacrebleu that need no download.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
# By the first part of a language's name, in ISO 639-1 and 639-3; `char` where sacrebleu has no tokenizer of words.
_BY_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn", "yue"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod"), "char"),
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
    """BLEU and chrF from 0 to 100, each with sacrebleu's signature.

    Attributes:
        exact: share of sentences that equal the reference, 0 to 1.
        sentences: number of sentences.
    """

    bleu: float
    chrf: float
    exact: float
    sentences: int
    bleu_signature: str
    chrf_signature: str

    def __str__(self) -> str:
        return (
            f"BLEU {self.bleu:.2f} ({self.bleu_signature})\nchrF {self.chrf:.2f} ({self.chrf_signature})\n"
            f"exact {100 * self.exact:.1f} % of {self.sentences:,} sentences"
        )


def bleu_tokenizer(language: str) -> str:
    """Return the name of sacrebleu's tokenizer for a target language such as `de`, `zh-CN` or `jpn_Jpan`."""
    return _BY_LANGUAGE.get(re.split("[-_]", language.lower())[0], "13a")


def check_bleu_tokenizer(tokenizer: str) -> None:
    """Raise ValueError for an unknown BLEU tokenizer, and ImportError if a package that it needs is not installed."""
    _metrics(tokenizer)


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
    """Score detokenised translations, each against its reference.

    Args:
        translations: one for each sentence.
        references: one for each sentence.
        lowercase: compare lower-cased text.
        tokenizer: sacrebleu's, for BLEU: one of `BLEU_TOKENIZERS`; see `bleu_tokenizer`.

    Raises:
        ValueError: the numbers of sentences differ, there is none, or there is no such tokenizer.
        ImportError: sacrebleu is not installed (it comes with the extra `apps`), or a package that the tokenizer needs.
    """
    _check_counts([translations], references)
    metrics = _metrics(tokenizer, lowercase)
    warn_without_spaces(tokenizer, references)
    bleu, chrf = (metric.corpus_score(list(translations), [list(references)]).score for metric in metrics.values())
    exact = sum(a == b for a, b in zip(translations, references, strict=True)) / len(references)
    signatures = (str(metric.get_signature()) for metric in metrics.values())
    return Scores(bleu, chrf, exact, len(references), *signatures)


@dataclass(frozen=True)
class PairedScore:
    """A score of one system, and the p-value of its difference to the first system."""

    system: str
    metric: str
    score: float
    p_value: float | None


def compare_translations(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    tokenizer: str = "13a",
    bootstrap: int = 1000,
) -> list[PairedScore]:
    """Compare systems with the first one by paired bootstrap resampling (Koehn 2004), as sacrebleu does.

    Args:
        systems: name -> translations, one for each sentence; at least two systems.
        references, tokenizer: as in `score_translations`.
        bootstrap: number of resamples.

    Returns BLEU and chrF of each system; the first one has no p-value. Raises the errors of `score_translations`.
    """
    from sacrebleu.significance import PairedTest

    _check_counts(list(systems.values()), references)
    pairs = [(name, list(translations)) for name, translations in systems.items()]
    test = PairedTest(pairs, _metrics(tokenizer), [list(references)], test_type="bs", n_samples=bootstrap)
    _, results = test()
    scores = []
    for metric in [name for name in results if name != "System"]:
        first = results[metric][0].score
        for system, result in zip(systems, results[metric], strict=True):
            # Of equal scores no resample differs more, which sacrebleu reports as the smallest p-value.
            equal = result.p_value is not None and result.score == first
            scores.append(PairedScore(system, metric, result.score, 1.0 if equal else result.p_value))
    return scores


def _check_counts(systems: Sequence[Sequence[str]], references: Sequence[str]) -> None:
    for translations in systems:
        if len(translations) != len(references):
            raise ValueError(f"{len(translations)} translations and {len(references)} references")
    if not references:
        raise ValueError("there is nothing to score")


def _metrics(tokenizer: str, lowercase: bool = False) -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    check_value("bleu_tokenizer", tokenizer, str, choices=BLEU_TOKENIZERS)
    try:
        return {"bleu": BLEU(lowercase=lowercase, tokenize=tokenizer), "chrf": CHRF(lowercase=lowercase)}
    except RuntimeError:  # MeCab or its dictionary is missing
        extra = tokenizer.partition("-")[0]
        raise ImportError(
            f"BLEU with tokenizer {tokenizer} needs MeCab: pip install 'sacrebleu[{extra}]'; or choose bleu_tokenizer "
            "char"
        ) from None
