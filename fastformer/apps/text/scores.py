"""Scores of translations: sacreBLEU, chrF and exact match, of real decoded text and nothing else.

The signatures say what was compared (Post 2018, "A call for clarity in reporting BLEU scores"): cased, tokenised by
sacrebleu itself (13a), so that the figures stand beside published ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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


def score_translations(translations: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Scores:
    """Compare detokenised translations with one reference each.

    Raises:
        ValueError: the numbers of sentences differ, or there is none.
        ModuleNotFoundError: sacrebleu is not installed; it comes with the extra `apps`.
    """
    from sacrebleu.metrics import BLEU, CHRF

    if len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations and {len(references)} references")
    if not references:
        raise ValueError("there is nothing to score")
    bleu, chrf = BLEU(lowercase=lowercase), CHRF(lowercase=lowercase)
    same = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
    return Scores(
        bleu.corpus_score(list(translations), [list(references)]).score,
        chrf.corpus_score(list(translations), [list(references)]).score,
        same / len(references),
        len(references),
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )
