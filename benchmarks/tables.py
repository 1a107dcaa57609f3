"""Markdown tables of results: a heading, every row, a summary by competitor, and missed goals.

Memory is fastformer's / the competitor's, and a ratio the competitor's time / fastformer's (with tokens: fastformer's
tokens a second / the competitor's).
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.harness.record import Row

_MISSES = 3  # of the missed goals of a result, listed below its summary
_STATUS = 60  # characters
Column = tuple[str, Callable[[Row], str]]


def heading(name: str, machine: Mapping[str, str], timer: str, ceilings: Mapping[str, float]) -> str:
    """Return the machine, versions and commit of a result, its timer, and the measured rates of the machine."""
    labels = {"gpu": "", "processor": "", "driver": "driver ", "cuda": "CUDA ", "cudnn": "cuDNN ", "torch": "torch "}
    labels |= {"triton": "triton ", "python": "Python "}
    facts = [label + machine[key] for key, label in labels.items() if key in machine]
    text = f"**{name}**, {machine['date']}, commit {machine['commit'][:8]}: {', '.join(facts)}; {timer}"
    rates = [f"{key.replace('_', ' ')} {_rate(key, rate)}" for key, rate in sorted(ceilings.items())]
    return text + (f"; fastest probes: {', '.join(rates)}" if rates else "")


def _rate(name: str, rate: float) -> str:
    unit = "B/s" if name == "copy" else "FLOP/s"
    scale, prefix = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / scale:,.{1 if rate / scale < 100 else 0}f} {prefix}{unit}"


def _ratio_cell(row: Row) -> str:
    if row.ratio is not None:
        return f"{row.ratio:.2f}"
    return _cell(row.status if len(row.status) <= _STATUS else row.status[: _STATUS - 1] + "…")


def _goal_cell(row: Row) -> str:
    return "-" if row.goal is None else f"{row.goal:g}" + (" (missed)" if row.missed else "")


def _memory_cell(pair: tuple[int, int] | None, goal: float | None) -> str:
    if pair is None:
        return ""
    share = pair[0] / pair[1] if pair[1] else (math.inf if pair[0] else 1.0)
    verdict = "" if goal is None else f" ({'missed' if share > goal else 'goal'} {goal:g})"
    return ("more than none" if math.isinf(share) else f"{share:.2f}") + verdict


_OPTIONAL: tuple[Column, ...] = (
    ("by the wall clock", lambda row: "" if row.wall is None else f"{row.wall:.2f}"),
    ("as CUDA graphs", lambda row: "" if row.graph is None else f"{row.graph:.2f}"),
    ("of the floor", lambda row: "" if row.floor is None else f"{100 * row.floor:.0f} %"),
    ("TFLOP/s", lambda row: f"{row.operations_per_second / 1e12:.3g}" if row.operations_per_second else ""),
    ("GB/s", lambda row: f"{row.bytes_per_second / 1e9:,.0f}" if row.bytes_per_second else ""),
    ("peak memory", lambda row: _memory_cell(row.peak_bytes, row.peak_goal)),
    ("saved for backward", lambda row: _memory_cell(row.saved_bytes, row.saved_goal)),
    ("commit", lambda row: row.commit[:8] if row.commit else ""),
)


def whole_table(rows: Sequence[Row]) -> str:
    """Return a table of every row, with the optional columns that a row fills."""
    columns: list[Column] = [("case", lambda row: _cell(row.case)), ("against", lambda row: _cell(row.against))]
    columns += [("ratio", _ratio_cell), ("goal", _goal_cell)]
    columns += [column for column in _OPTIONAL if any(column[1](row) for row in rows)]
    return _table([name for name, _ in columns], ([show(row) for _, show in columns] for row in rows))


def grouped(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows by benchmark and competitor."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.benchmark, row.against), []).append(row)
    return groups


def summary_table(rows: Sequence[Row], most: int | None = None) -> str:
    """Return a table with one line a competitor: mean (geometric), worst and best ratio, and goals that are held."""
    lines = []
    for (benchmark, against), group in [*grouped(rows).items()][:most]:
        ratios = [row.compared for row in group if row.compared is not None]
        values = (statistics.geometric_mean(ratios), min(ratios), max(ratios)) if ratios else ()
        numbers = [f"{value:.2f}" for value in values] or ["-"] * 3
        reasons = Counter(row.status.partition(":")[0] for row in group if row.ratio is None)
        untimed = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        lines.append([benchmark, _cell(against), str(len(group)), *numbers, goals_held(group), untimed])
    head = ["benchmark", "against", "cases", "ratio, mean", "worst", "best", "goals held", "not timed"]
    if not any(line[-1] for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    return _table(head, lines)


def goals_held(rows: Iterable[Row]) -> str:
    """Return "N of M"; a goal counts if both sides were timed, or if fastformer could not be."""
    counted = [row for row in rows if row.goal is not None and (row.ratio is not None or row.ours is None)]
    held = sum(row.ratio is not None and not row.missed for row in counted)
    return f"{held} of {len(counted)}" if counted else "-"


def missed_goals(rows: Sequence[Row]) -> str:
    """Return a sentence with the worst missed goals, and the number of the others; "" if no goal is missed."""
    missed = sorted((row for row in rows if row.missed), key=lambda row: (row.compared or 0) / (row.goal or 1))
    if not missed:
        return ""
    listed = [f"{row.case} against {row.against} ({row.compared:.2f} of {row.goal:g})" for row in missed[:_MISSES]]
    listed = [_cell(text) for text in listed]
    if missed[_MISSES:]:
        listed.append(f"{len(missed) - _MISSES} more in RESULTS.md")
    return f"Missed: {'; '.join(listed)}."


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def _cell(text: str) -> str:
    """Escape Markdown, so that text stays within its cell."""
    return " ".join(re.sub(r"([\\|*_<`])", r"\\\1", text).split())
