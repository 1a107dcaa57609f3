"""Results as Markdown: what they were measured on, whole tables, and a summary a competitor.

A ratio is the competitor's time over ours (with tokens: our tokens a second over theirs); memory is ours over theirs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from benchmarks.harness.record import Row
from benchmarks.report.results import CommittedResult, grouped

WHOLE = 20  # rows, up to which the README shows a table whole
_MISSES = 3  # of the missed goals of a result, so many are listed below its summary
_STATUS = 60  # characters
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

Column = tuple[str, Callable[[Row], str]]


def heading(result: CommittedResult) -> str:
    """What a result was measured on, and the most that this machine does."""
    m = result.machine
    parts = [m["gpu"]] if "gpu" in m else []
    parts.append(m["processor"])
    labels = {"driver": "driver", "cuda": "CUDA", "cudnn": "cuDNN", "torch": "torch", "triton": "triton"}
    parts += [f"{label} {m[key]}" for key, label in labels.items() if key in m]
    parts.append(f"Python {m['python']}")
    said = [f"**{result.name}**, {m['date']}, commit {m['commit'][:8]}: {', '.join(parts)}", result.timer]
    if result.ceilings:
        rates = sorted(result.ceilings.items())
        said.append("at most " + ", ".join(f"{key.replace('_', ' ')} {_rate(key, rate)}" for key, rate in rates))
    if result.matmul:
        slow, fast = (rate / 1e9 for rate in result.matmul)
        said.append(f"a matrix product in fp32 ran at {slow:,.0f} to {fast:,.0f} GFLOP/s beside the cases")
    if not result.complete:
        said.append("the run was cut before its end")
    return "; ".join(said) + "."


def _rate(name: str, rate: float) -> str:
    unit = "B/s" if name == "copy" else "FLOP/s"
    scale, prefix = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / scale:,.{1 if rate / scale < 100 else 0}f} {prefix}{unit}"


def ratio_cell(row: Row) -> str:
    """The ratio, or why there is none."""
    if row.ratio is not None:
        return f"{row.ratio:.2f}"
    return _cell(row.status if len(row.status) <= _STATUS else row.status[: _STATUS - 1] + "…")


def _goal_cell(row: Row) -> str:
    return "-" if row.goal is None else f"{row.goal:g}" + (" (missed)" if row.missed else "")


def _share(pair: tuple[int, int] | None, goal: float | None) -> str:
    if pair is None:
        return ""
    share = pair[0] / pair[1] if pair[1] else (math.inf if pair[0] else 1.0)
    said = "" if goal is None else f" ({'missed' if share > goal else 'goal'} {goal:g})"
    return ("more than none" if math.isinf(share) else f"{share:.2f}") + said


_FURTHER: tuple[Column, ...] = (
    ("by the wall clock", lambda row: "" if row.wall is None else f"{row.wall:.2f}"),
    ("as CUDA graphs", lambda row: "" if row.graph is None else f"{row.graph:.2f}"),
    ("of the floor", lambda row: "" if row.floor is None else f"{100 * row.floor:.0f} %"),
    ("TFLOP/s", lambda row: f"{row.operations_per_second / 1e12:.3g}" if row.operations_per_second else ""),
    ("GB/s", lambda row: f"{row.bytes_per_second / 1e9:,.0f}" if row.bytes_per_second else ""),
    ("peak memory", lambda row: _share(row.peak_bytes, row.peak_goal)),
    ("saved for backward", lambda row: _share(row.saved_bytes, row.saved_goal)),
)


def whole_table(rows: Sequence[Row]) -> str:
    """Every row; of the further columns those that have something to say."""
    columns: list[Column] = [
        ("case", lambda row: _cell(row.case)),
        ("against", lambda row: _cell(row.against)),
        ("ratio", ratio_cell),
        ("goal", _goal_cell),
        *(column for column in _FURTHER if any(column[1](row) for row in rows)),
    ]
    return _table([name for name, _ in columns], ([show(row) for _, show in columns] for row in rows))


def summary_table(rows: Sequence[Row]) -> str:
    """One line a competitor: geometric mean, worst and best of the ratios, and how many goals were held."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.benchmark, row.against), []).append(row)
    lines = []
    for (benchmark, against), group in groups.items():
        ratios = [row.ratio for row in group if row.ratio is not None]
        numbers = ["-"] * 3
        if ratios:
            numbers = [f"{value:.2f}" for value in (geometric_mean(ratios), min(ratios), max(ratios))]
        lines.append([benchmark, _cell(against), str(len(group)), *numbers, goals_held(group), _untimed(group)])
    head = ["benchmark", "against", "cases", "ratio, mean", "worst", "best", "goals held", "not timed"]
    if not any(line[-1] for line in lines):
        head, lines = head[:-1], [line[:-1] for line in lines]
    return _table(head, lines)


def goals_held(rows: Iterable[Row]) -> str:
    """Held of all that could be: a goal counts where both were timed, and where ours could not be."""
    counted = [row for row in rows if row.goal is not None and (row.ratio is not None or row.ours is None)]
    held = sum(row.ratio is not None and not row.missed for row in counted)
    return f"{held} of {len(counted)}" if counted else "-"


def misses(rows: Sequence[Row], more: str) -> str:
    """The missed goals, the worst first; `more`: where the others stand. "" if there are none."""
    missed = sorted((row for row in rows if row.missed), key=lambda row: (row.ratio or 0) / (row.goal or 1))
    if not missed:
        return ""
    listed = [f"{row.case} against {row.against} ({ratio_cell(row)} of {row.goal:g})" for row in missed[:_MISSES]]
    left = len(missed) - len(listed)
    return "Missed: " + "; ".join(_cell(text) for text in listed) + (f"; {left} more in {more}" if left else "") + "."


def geometric_mean(ratios: Sequence[float]) -> float:
    """exp of the mean of the logarithms."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def _untimed(rows: Sequence[Row]) -> str:
    reasons = Counter(row.status.partition(":")[0] for row in rows if row.ratio is None)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def _cell(text: str) -> str:
    """Text that stays within its cell and is no Markdown."""
    for special in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(special, "\\" + special)
    return " ".join(text.split())


def by_benchmark(result: CommittedResult) -> Iterable[tuple[str, str]]:
    """Each benchmark's name and whole table."""
    return ((name, whole_table(rows)) for name, rows in grouped(result.rows).items())
