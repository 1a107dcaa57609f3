"""Write committed results, and the README's section, tables and charts from them: no figure is ever typed.

    pytest benchmarks --benchmark-only --record run.jsonl
    python -m benchmarks.report run.jsonl cpu     # benchmarks/results/cpu.json, then everything made from the results
    python -m benchmarks.report DIR h200          # the same for all runs of `benchmarks.lane` in a folder
    python -m benchmarks.report                   # README.md, benchmarks/RESULTS.md and docs/benchmarks-*.png again

Several runs of one machine, driver, set of versions and commit make one result. If a case was measured twice, the row
of the later file counts: in the order given, in a folder by name. Runs that differ are refused, and runs of uncommitted
code. In tables memory is ours / theirs, and a ratio the competitor's time / ours (with tokens: our tokens a second /
theirs).
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.harness.record import CommittedResult, Row, condense
from benchmarks.report import BEGIN, END, charts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
RECORDS = "benchmarks*.jsonl"  # in folders: the files of `benchmarks.lane`
WHOLE = 20  # rows; the README has the whole table of a result with at most so many, and a summary of larger ones
_MISSES = 3  # of the missed goals of a result, listed below its summary
_STATUS = 60  # characters
_RATIO = "Ratio = their time / ours (or our tokens/s / theirs): above 1 ours is faster."
_MEMORY = "Memory is ours / theirs: below 1 ours is smaller."
# Benchmark and competitor of the README's summary: what users decide by. RESULTS.md has them all.
DECISIVE = (
    ("modules", "torch.nn.MultiheadAttention"),
    ("modules", "torch.nn.TransformerEncoderLayer"),
    ("packing", "torch.nn.TransformerEncoder"),
    ("packing", "torch.nn.Transformer"),
    ("training_step", "torch.nn.Transformer"),
    ("integrations", "transformers, sdpa"),
    ("cached_decoding", "torch.nn, whole prefix each token (16 timed)"),
    ("decoding", "transformers, Marian generate"),
    ("decoding", "CTranslate2"),
    ("generation", "GPT-2 of transformers"),
)


def load_results(folder: Path = RESULTS) -> list[CommittedResult]:
    """Return all committed results, by name."""
    return [CommittedResult.load(path) for path in sorted(folder.glob("*.json"))]


def section(results: Sequence[CommittedResult]) -> str:
    """Return the README's section: small results whole, of large ones a summary of what users decide by."""
    parts = [BEGIN, f"{_RATIO} All tables: [benchmarks/RESULTS.md](benchmarks/RESULTS.md)."]
    for result in results:
        parts.append(heading(result))
        if len(result.rows) <= WHOLE:
            parts.append(whole_table(result.rows))
        else:
            decisive = [row for row in result.rows if (row.benchmark, row.against) in DECISIVE]
            parts += [summary_table(decisive or result.rows), missed_goals(result.rows)]
        parts.append(f"![Ratios of {result.name}](docs/{charts.bars_name(result)})")
    return "\n\n".join(part for part in [*parts, END] if part)


def all_tables(results: Sequence[CommittedResult]) -> str:
    """Return the text of benchmarks/RESULTS.md."""
    parts = ["# Results", f"Written by `python -m benchmarks.report`. {_RATIO} {_MEMORY}"]
    for result in results:
        parts += [f"## {result.name}", heading(result), "### Summary", summary_table(result.rows)]
        parts.append(f"![Ratios of {result.name}](../docs/{charts.bars_name(result)})")
        for name, rows in result.by_benchmark().items():
            parts += [f"### {name}", whole_table(rows)]
    return "\n\n".join(parts) + "\n"


def heading(result: CommittedResult) -> str:
    """Return the machine, versions and commit of a result, and the measured ceilings of the machine."""
    m = result.machine
    parts = [m["gpu"]] if "gpu" in m else []
    parts.append(m["processor"])
    labels = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "torch": "torch", "triton": "triton"}
    parts += [f"{label} {m[key]}" for key, label in labels.items() if key in m]
    parts.append(f"Python {m['python']}")
    sentences = [f"**{result.name}**, {m['date']}, commit {m['commit'][:8]}: {', '.join(parts)}", result.timer]
    if result.ceilings:
        rates = [f"{key.replace('_', ' ')} {_rate(key, rate)}" for key, rate in sorted(result.ceilings.items())]
        sentences.append(f"fastest probes: {', '.join(rates)}")
    if result.matmul:
        slow, fast = (rate / 1e9 for rate in result.matmul)
        sentences.append(f"an fp32 matrix product, timed between the cases, ran at {slow:,.0f} to {fast:,.0f} GFLOP/s")
    if not result.complete:
        sentences.append("the run was cut before its end")
    return "; ".join(sentences) + "."


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


_OPTIONAL: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("by the wall clock", lambda row: "" if row.wall is None else f"{row.wall:.2f}"),
    ("as CUDA graphs", lambda row: "" if row.graph is None else f"{row.graph:.2f}"),
    ("of the floor", lambda row: "" if row.floor is None else f"{100 * row.floor:.0f} %"),
    ("TFLOP/s", lambda row: f"{row.operations_per_second / 1e12:.3g}" if row.operations_per_second else ""),
    ("GB/s", lambda row: f"{row.bytes_per_second / 1e9:,.0f}" if row.bytes_per_second else ""),
    ("peak memory", lambda row: _memory_cell(row.peak_bytes, row.peak_goal)),
    ("saved for backward", lambda row: _memory_cell(row.saved_bytes, row.saved_goal)),
)


def whole_table(rows: Sequence[Row]) -> str:
    """Return a table of every row, with those optional columns that a row fills."""
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("case", lambda row: _cell(row.case)),
        ("against", lambda row: _cell(row.against)),
        ("ratio", _ratio_cell),
        ("goal", _goal_cell),
        *(column for column in _OPTIONAL if any(column[1](row) for row in rows)),
    ]
    return _table([name for name, _ in columns], ([show(row) for _, show in columns] for row in rows))


def summary_table(rows: Sequence[Row]) -> str:
    """Return a table with one line a competitor: mean (geometric), worst and best ratio, and goals that are held."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.benchmark, row.against), []).append(row)
    lines = []
    for (benchmark, against), group in groups.items():
        ratios = [row.ratio for row in group if row.ratio is not None]
        values = (charts.geometric_mean(ratios), min(ratios), max(ratios)) if ratios else ()
        numbers = [f"{value:.2f}" for value in values] or ["-"] * 3
        lines.append([benchmark, _cell(against), str(len(group)), *numbers, goals_held(group), _untimed(group)])
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
    missed = sorted((row for row in rows if row.missed), key=lambda row: (row.ratio or 0) / (row.goal or 1))
    if not missed:
        return ""
    listed = [f"{row.case} against {row.against} ({_ratio_cell(row)} of {row.goal:g})" for row in missed[:_MISSES]]
    left = len(missed) - len(listed)
    return (
        "Missed: " + "; ".join(_cell(text) for text in listed) + (f"; {left} more in RESULTS.md" if left else "") + "."
    )


def _untimed(rows: Sequence[Row]) -> str:
    reasons = Counter(row.status.partition(":")[0] for row in rows if row.ratio is None)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def _cell(text: str) -> str:
    """Escape Markdown, so that text stays within its cell."""
    for special in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(special, "\\" + special)
    return " ".join(text.split())


def write(results: Sequence[CommittedResult]) -> list[Path]:
    """Write the README's section, RESULTS.md and the charts; remove charts of deleted results."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme} must hold each of the lines {BEGIN!r} and {END!r} once")
    readme.write_text(text.partition(BEGIN)[0] + section(results) + text.partition(END)[2], encoding="utf-8")
    tables_file = ROOT / "benchmarks" / "RESULTS.md"
    tables_file.write_text(all_tables(results), encoding="utf-8")
    drawn = [charts.draw(result, DOCS) for result in results]
    for path in set(DOCS.glob(f"{charts.PREFIX}*.png")) - set(drawn):
        path.unlink()
    return [readme, tables_file, *drawn]


def _records(path: Path) -> list[Path]:
    records = sorted(path.rglob(RECORDS)) if path.is_dir() else [path]
    if not records:
        raise ValueError(f"{path}: no {RECORDS} there")
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a result if runs are given, then write everything; return 2 for invalid runs."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and (len(arguments) == 1 or arguments[0].startswith("-")):
        print("usage: python -m benchmarks.report [RUN.jsonl or FOLDER ... NAME]", file=sys.stderr)
        return 2
    try:
        if arguments:
            *given, name = arguments
            print(condense([path for text in given for path in _records(Path(text))], name).save(RESULTS))
        for path in write(load_results()):
            print(path)
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
