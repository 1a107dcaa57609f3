"""The record of `benchmarks.recipes`: its goals, its rows, and the table of them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "record.jsonl"
# Status of a row: the test set is not evaluated yet; it is; it is, but training was interrupted.
TRAINED, DONE, CUT = "trained", "done", "cut"

SeedRow = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A value of a row, and how high or low it must be."""

    value: str
    bound: float
    at_least: bool = True

    def __str__(self) -> str:
        return f"{self.value} {'>=' if self.at_least else '<='} {self.bound:g}"

    def held(self, row: SeedRow) -> bool | None:
        """Whether a row keeps it; None where the row has no such value."""
        found = row.get(self.value)
        if found is None:
            return None
        return bool(found >= self.bound if self.at_least else found <= self.bound)


# By the recipe's name. Time counts from reading the data to the last validation, tokenizers included.
_THREE_MINUTES = Goal("training_seconds", 180, at_least=False)
GOALS: Mapping[str, tuple[Goal, ...]] = {
    "multi30k-en-de-gpu": (Goal("bleu", 40.0), Goal("bleu_lowercase_tokenised", 41.0), _THREE_MINUTES),
    "multi30k-en-fr-gpu": (Goal("bleu_lowercase_tokenised", 61.5),),
    "wikitext2-word-gpu": (Goal("perplexity", 80, at_least=False), Goal("training_seconds", 300, at_least=False)),
}

# Heading of a column -> the row's value, its scale and its format.
_COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "train s": ("training_seconds", 1, ".1f"),
    "steps": ("steps", 1, ",.0f"),
    "ms/step": ("step_seconds", 1e-3, ".2f"),
    "tokens/s": ("tokens_per_second", 1, ",.0f"),
    "peak MB": ("peak_bytes", 1e6, ",.0f"),
    "BLEU": ("bleu", 1, ".2f"),
    "BLEU lc": ("bleu_lowercase", 1, ".2f"),
    "BLEU lc tok": ("bleu_lowercase_tokenised", 1, ".2f"),
    "chrF": ("chrf", 1, ".2f"),
    "perplexity": ("perplexity", 1, ".2f"),
    "overlapped": ("perplexity_overlapped", 1, ".2f"),
    "test tokens": ("test_tokens", 1, ",.0f"),
}


def judged(goals: Sequence[Goal], row: SeedRow) -> dict[str, bool | None]:
    """Each goal in words, and whether a row keeps it."""
    return {str(goal): goal.held(row) for goal in goals}


def key_of(row: SeedRow) -> tuple[str, str, int]:
    """What tells a run from the others: recipe, what was changed in it, and seed."""
    return row["recipe"], row["variant"], row["seed"]


def heading(row: SeedRow) -> str:
    """The recipe, and what was changed in it."""
    return ", ".join(filter(None, (row["recipe"], row["variant"])))


def read_rows(record: Path) -> list[dict[str, Any]]:
    """The last line of every run, in the order of their beginnings; a last line that a crash cut off is left out."""
    if not record.is_file():
        return []
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    lines = record.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            found[key_of(row)] = row
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise ValueError(f"{record}:{number}: is no row of this record") from None
    return list(found.values())


def table(rows: Sequence[SeedRow]) -> list[str]:
    """Recipe by recipe: a line a seed, then mean and standard deviation of those that are done, then the goals."""
    lines: list[str] = []
    for name in dict.fromkeys(map(heading, rows)):
        lines += _of_recipe(name, [row for row in rows if heading(row) == name])
    return lines


def _of_recipe(name: str, rows: Sequence[SeedRow]) -> list[str]:
    known = {head: rule for head, rule in _COLUMNS.items() if any(row.get(rule[0]) is not None for row in rows)}
    cells = [["seed", *known, "status"]]
    for row in rows:
        shown = [_shown(row.get(value), scale, form) for value, scale, form in known.values()]
        cells.append([str(row["seed"]), *shown, _status(row)])
    for label, of in (("mean", statistics.mean), ("deviation", statistics.stdev)):
        line = [label]
        for value, scale, form in known.values():
            values = [row[value] for row in rows if row["status"] == DONE and row.get(value) is not None]
            line.append(_shown(of(values) if len(values) > 1 else None, scale, form))
        if len(rows) > 1:
            cells.append([*line, ""])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    found = [name]
    found += ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    for goal in dict.fromkeys(goal for row in rows for goal in row.get("goals", {})):
        answers = [row["goals"][goal] for row in rows if row["status"] == DONE]
        judged = [answer for answer in answers if answer is not None]
        found.append(f"goal {goal}: " + (f"held by {sum(judged)} of {len(judged)}" if judged else "not judged"))
    return found


def _shown(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value / scale, form)


def _status(row: SeedRow) -> str:
    reason = row.get("reason")
    return str(row["status"]) + (f" ({reason})" if reason not in (None, "minutes") else "")
