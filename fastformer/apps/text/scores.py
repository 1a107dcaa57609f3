"""Scores of translations: sacreBLEU, chrF, TER and exact match, computed on detokenised text only.

BLEU counts words, whose boundaries differ by language. Scores can be compared only if their signatures are equal (Post
2018, "A call for clarity in reporting BLEU scores").
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """BLEU and chrF from 0 to 100, and TER from 0 up (lower is better), each with sacrebleu's signature.

    Attributes:
        exact: share of sentences that equal a reference, 0 to 1.
        sentences: number of sentences.
        intervals: half of the 95 % interval of "bleu", "chrf" and "ter", with bootstrap resampling.
    """

    bleu: float
    chrf: float
    ter: float
    exact: float
    sentences: int
    bleu_signature: str
    chrf_signature: str
    ter_signature: str
    intervals: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for name, title in (("bleu", "BLEU"), ("chrf", "chrF"), ("ter", "TER")):
            interval = f" ± {self.intervals[name]:.2f}" if name in self.intervals else ""
            lines.append(f"{title} {getattr(self, name):.2f}{interval} ({getattr(self, f'{name}_signature')})")
        return "\n".join([*lines, f"exact {100 * self.exact:.1f} % of {self.sentences:,} sentences"])


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
            "BLEU is meaningless for these references: its tokenizer %s splits words at spaces, and their script has "
            "none; choose another, such as bleu_tokenizer zh or char, or state the target_language",
            tokenizer,
        )


def score_translations(
    translations: Sequence[str],
    references: Sequence[str],
    lowercase: bool = False,
    tokenizer: str = "13a",
    *,
    more_references: Sequence[Sequence[str]] = (),
    bootstrap: int = 0,
    warn: bool = True,
) -> Scores:
    """Score detokenised translations against one or several references each.

    Args:
        translations: one for each sentence.
        references: one for each sentence.
        lowercase: compare lower-cased text.
        tokenizer: sacrebleu's, for BLEU: one of `BLEU_TOKENIZERS`; see `bleu_tokenizer`.
        more_references: further references, each list with one for each sentence.
        bootstrap: resamples of the sentences for 95 % intervals (Koehn 2004); 0: no intervals.
        warn: log a warning if the tokenizer splits at spaces, and the references are of a script without spaces.

    Raises:
        ValueError: the numbers of sentences differ, there is none, or there is no such tokenizer.
        ImportError: sacrebleu is not installed (it comes with the extra `apps`), or a package that the tokenizer needs.
    """
    _check_counts(references, translations, *more_references)
    if warn:
        warn_without_spaces(tokenizer, references)
    lists = [list(references), *map(list, more_references)]
    values: dict[str, Any] = {}
    intervals = {}
    for name, metric in _metrics(tokenizer, lowercase).items():
        _return_floats(metric)
        score = metric.corpus_score(list(translations), lists, n_bootstrap=max(bootstrap, 1))
        values |= {name: score.score, f"{name}_signature": str(metric.get_signature())}
        intervals[name] = float(score._ci)
    compared = [[line.lower() for line in lines] if lowercase else lines for lines in (translations, *lists)]
    same = sum(translation in each for translation, *each in zip(*compared, strict=True))
    return Scores(
        **values, exact=same / len(references), sentences=len(references), intervals=intervals if bootstrap else {}
    )


def _return_floats(metric: Any) -> None:
    """Make a metric return Python floats: sacrebleu's bootstrap cannot average them with NumPy's, which it mixes."""
    compute = metric._compute_score_from_stats

    def compute_float(stats: Any) -> Any:
        score = compute(stats)
        score.score = float(score.score)
        return score

    metric._compute_score_from_stats = compute_float


class PairedScore(NamedTuple):
    """A score of one system, and the p-value of its difference to the first system."""

    system: str
    metric: str
    score: float
    p_value: float | None


def compare_translations(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], tokenizer: str = "13a", bootstrap: int = 1000
) -> list[PairedScore]:
    """Compare systems with the first one by paired bootstrap resampling (Koehn 2004), as sacrebleu does.

    Args:
        systems: name -> translations, one for each sentence; at least two systems.
        references, tokenizer: as in `score_translations`, with its errors.
        bootstrap: number of resamples.

    Returns BLEU, chrF and TER of each system; the first one has no p-value.
    """
    from sacrebleu.significance import PairedTest

    _check_counts(references, *systems.values())
    warn_without_spaces(tokenizer, references)
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


def _check_counts(references: Sequence[str], *others: Sequence[str]) -> None:
    for each in others:
        if len(each) != len(references):
            raise ValueError(f"{len(each)} translations and {len(references)} references")
    if not references:
        raise ValueError("there is nothing to score")


def _metrics(tokenizer: str, lowercase: bool = False) -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF, TER

    check_value("bleu_tokenizer", tokenizer, str, choices=BLEU_TOKENIZERS)
    try:
        bleu = BLEU(lowercase=lowercase, tokenize=tokenizer)
    except RuntimeError:  # MeCab or its dictionary is missing
        extra = tokenizer.partition("-")[0]
        raise ImportError(
            f"BLEU with tokenizer {tokenizer} needs MeCab: pip install 'sacrebleu[{extra}]'; or choose bleu_tokenizer "
            "char"
        ) from None
    return {"bleu": bleu, "chrf": CHRF(lowercase=lowercase), "ter": TER()}  # TER is lower-cased, as in tercom
