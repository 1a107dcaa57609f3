"""Charts of results: a bar a ratio, and how the cost grows with length, batch, width or padding.

Each picture carries a digest of what it shows, by which a test finds those that are out of date.
"""

import hashlib
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Row
from benchmarks.report.results import CommittedResult, grouped, rounded
from benchmarks.report.tables import geometric_mean
from fastformer.apps.plots import figure as frames

PREFIX = "benchmarks-"
_BARS = 40  # rows, up to which each has its own bar; beyond, a bar a competitor
_PANELS = 12  # of a scaling chart; further families of cases are in the tables
_DIGEST = "Source"  # one of the names of texts that PNG defines
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?k?")
_OUT_OF_MEMORY = "out of memory"
_POINTS = 3  # fewer make no line of growth
_HELD, _PARTLY, _MISSED = "tab:blue", "tab:orange", "tab:red"


@dataclass(frozen=True)
class Bar:
    """A ratio, or the mean of some with the worst and the best; the goal if it is one for all; the number of goals,
    and of those that were missed.
    """

    label: str
    ratio: float
    worst: float
    best: float
    goal: float | None
    goals: int
    missed: int


@dataclass(frozen=True)
class Panel:
    """How a quantity grows along an axis: by side, "fastformer" first, points (value of the axis, multiple).

    Multiples are of what fastformer takes at the smallest value.
    """

    title: str
    axis: str
    quantity: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    out_of_memory: Mapping[str, Sequence[float]]  # by side, at which values


def bars_name(result: CommittedResult) -> str:
    """The file name of the chart of all ratios."""
    return f"{PREFIX}{result.name}.png"


def scaling_names(result: CommittedResult) -> dict[str, str]:
    """The file names of the scaling charts, by benchmark; of those only that have something that grows."""
    groups = grouped(result.rows).items()
    return {
        benchmark: f"{PREFIX}{result.name}-{benchmark.replace('_', '-')}-scaling.png"
        for benchmark, rows in groups
        if panels(rows)
    }


def digests(result: CommittedResult) -> dict[str, str]:
    """File name -> what its picture must carry to be of this result."""
    groups = grouped(result.rows)
    shown: dict[str, object] = {bars_name(result): bars(result.rows)}
    shown |= {name: panels(groups[benchmark]) for benchmark, name in scaling_names(result).items()}
    return {
        name: hashlib.sha256(repr((_title(result), what)).encode()).hexdigest()[:16] for name, what in shown.items()
    }


def _title(result: CommittedResult) -> str:
    machine = result.machine
    return f"{result.name}: {machine.get('gpu', machine['processor'])}, {machine['date']}"


def digest_of(path: Path) -> str | None:
    """What a picture carries."""
    from PIL import Image

    with Image.open(path) as picture:
        found = picture.info.get(_DIGEST)
    return None if found is None else str(found)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """A bar a row, or a competitor of a benchmark if there are many."""
    timed = [row for row in rows if row.ratio is not None]
    if len(timed) <= _BARS:
        return [_bar(f"{row.case}\nagainst {row.against}", [row]) for row in timed]
    groups: dict[str, list[Row]] = {}
    for row in timed:
        groups.setdefault(f"{row.benchmark.replace('_', ' ')}\nagainst {row.against}", []).append(row)
    return [_bar(f"{label}, {_counted(len(group), 'case')}", group) for label, group in groups.items()]


def _bar(label: str, rows: Sequence[Row]) -> Bar:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    goals = [row.goal for row in rows]
    goal = goals[0] if len(set(goals)) == 1 else None
    mean = rounded(geometric_mean(ratios))
    missed = sum(row.missed for row in rows)
    return Bar(label, mean, min(ratios), max(ratios), goal, len(goals) - goals.count(None), missed)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Families of cases that differ in one number of `at`, at three values of it or more; time first, then memory.

    Cases are of one family if their names are the same apart from that number.
    """
    found = []
    for quantity in ("time", "peak memory"):
        families: dict[tuple[str, str], list[tuple[float, Row]]] = {}
        for row in rows:
            for axis, value in row.at.items():
                title = _family(row.case, axis, value)
                if title is not None:
                    families.setdefault((axis, title), []).append((value, row))
        for (axis, title), members in families.items():
            panel = _panel(title, axis, quantity, members)
            if panel is not None:
                found.append(panel)
    return found


def _panel(title: str, axis: str, quantity: str, members: Sequence[tuple[float, Row]]) -> Panel | None:
    sides: dict[str, dict[float, list[float]]] = {}
    full: dict[str, list[float]] = {}
    for value, row in members:
        for side, amount in zip(("fastformer", row.against), _amounts(row, quantity), strict=True):
            if amount:
                sides.setdefault(side, {}).setdefault(value, []).append(amount)
        if _OUT_OF_MEMORY in row.status:
            full.setdefault("fastformer" if row.status.startswith("fastformer") else row.against, []).append(value)
    ours = sides.get("fastformer", {})
    if len(ours) < _POINTS:
        return None
    unit = statistics.median(ours[min(ours)])
    if quantity == "time":
        quantity = f"time per {'token' if any(row.tokens[0] > 1 for _, row in members) else 'call'}"
    lines = {
        side: [(value, rounded(statistics.median(points[value]) / unit)) for value in sorted(points)]
        for side, points in sides.items()
    }
    return Panel(title, axis, quantity, lines, {side: sorted(set(values)) for side, values in full.items()})


def _amounts(row: Row, quantity: str) -> tuple[float | None, float | None]:
    """Of both sides, None where it was not measured; times are by the token."""
    if quantity == "peak memory":
        return row.peak_bytes or (None, None)
    ours, theirs = (None if t is None else t / n for t, n in zip((row.ours, row.theirs), row.tokens, strict=True))
    return ours, theirs


def _family(case: str, axis: str, value: float) -> str | None:
    """The name with "…" for the number on the axis: "layer norm 8,192 x 1,024" -> "layer norm … x 1,024".

    None where the name does not say that number: then it comes with another that the case is about.
    """

    def is_meant(text: str) -> bool:
        number = float(text.rstrip("k").replace(",", ""))
        meant = (number * 1000, number * 1024) if text.endswith("k") else (number, number / 100)
        return any(math.isclose(value, one, rel_tol=6e-3) for one in meant)

    found = [match for match in _NUMBER.finditer(case) if is_meant(match[0])]
    named = [match for match in found if case[: match.start()].rstrip().endswith(axis)]
    if not found:
        return None
    match = (named or found)[0]
    return f"{case[: match.start()]}…{case[match.end() :]}"


def draw(result: CommittedResult, folder: Path) -> list[Path]:
    """Draw all charts of a result.

    Raises:
        ImportError: matplotlib is missing.
    """
    expected = digests(result)
    title = _title(result)
    figures = {bars_name(result): _draw_bars(bars(result.rows), title)}
    groups = grouped(result.rows)
    for benchmark, name in scaling_names(result).items():
        figures[name] = _draw_panels(panels(groups[benchmark])[:_PANELS], f"{benchmark.replace('_', ' ')}, {title}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=frames.DPI, format="png", metadata={_DIGEST: expected[name]})
    return [folder / name for name in figures]


def _draw_bars(bars: Sequence[Bar], title: str) -> Any:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = frames.new_figure(10, 1.6 + 0.38 * max(len(bars), 2))
    axes = figure.subplots()
    lowest = min([0.8, *(min(bar.worst, bar.goal or 1.0) for bar in bars)]) / 1.15
    highest = max([1.25, *(max(bar.best, bar.goal or 1.0) for bar in bars)])
    for y, bar in enumerate(bars):
        color = _HELD if not bar.missed else _MISSED if bar.missed == bar.goals else _PARTLY
        axes.barh(y, bar.ratio - 1, left=1, height=0.62, color=color, alpha=0.85)
        if bar.worst < bar.best:
            axes.plot([bar.worst, bar.best], [y, y], color="black", linewidth=1, marker="|", markersize=6)
        if bar.goal is not None:
            axes.plot([bar.goal] * 2, [y - 0.42, y + 0.42], color="black", linewidth=2)
        end = max(bar.best, bar.goal or 0, 1.0)
        text = f"{bar.ratio:.2f}" if bar.worst == bar.best else f"mean {bar.ratio:.2f}"
        axes.annotate(text, (end, y), (5, 0), textcoords="offset points", va="center", fontsize="small", color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(lowest, highest * (highest / lowest) ** 0.2)  # room for the last number
    steps = (1.0, 2.0, 5.0) if highest / lowest > 8 else (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0, 9.0)
    axes.xaxis.set_major_locator(LogLocator(subs=steps))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), labels=[frames.plain(bar.label) for bar in bars], fontsize=7.5, linespacing=1.15)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    legend = "their time / fastformer's: right of 1 fastformer is faster\n"
    if any(bar.goal is not None for bar in bars):
        legend += "black mark: goal"
    if any(bar.missed for bar in bars):
        legend += "; red: missed"
    if any(0 < bar.missed < bar.goals for bar in bars):
        legend += ", orange: in some cases"
    if any(bar.worst < bar.best for bar in bars):
        legend += "; thin line: worst to best"
    axes.set_xlabel(legend.rstrip().replace("\n; ", "\n"), fontsize="small")
    frames.set_title(figure, title)
    return figure


def _draw_panels(panels: Sequence[Panel], title: str) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullLocator

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = frames.new_figure(max(4.3 * columns, 5.5), 0.9 + 3.6 * rows)
    sides = dict.fromkeys(side for panel in panels for side in panel.lines if side != "fastformer")
    styles: dict[str, dict[str, Any]] = {
        side: {"color": f"C{1 + i % 9}", "linestyle": "--"} for i, side in enumerate(sides)
    }
    styles["fastformer"] = {"color": "tab:blue", "linewidth": 2.5}
    for axes, panel in zip(frames.grid(figure, rows, columns, len(panels)), panels, strict=True):
        for side, points in sorted(panel.lines.items(), key=lambda item: item[0] == "fastformer"):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker="o", markersize=4, **styles[side])
        values = sorted({value for points in panel.lines.values() for value, _ in points})
        if values[0] > 0 and values[-1] / values[0] >= 4:
            axes.set_xscale("log")
        axes.set_yscale("log")
        stride = -(-len(values) // 7)
        axes.set_xticks(values[::stride], labels=[f"{value:g}" for value in values[::stride]], fontsize="small")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if max(y for points in panel.lines.values() for _, y in points) < 10:
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.tick_params(axis="y", which="minor", labelsize="small")
        axes.set_xlabel(panel.axis)
        axes.set_ylabel(f"{panel.quantity}, multiple")
        title_lines = _wrapped(panel.title)
        for side, full in panel.out_of_memory.items():
            title_lines += _wrapped(f"{side}: {_OUT_OF_MEMORY} at {', '.join(f'{value:,g}' for value in full)}")
        axes.set_title("\n".join(title_lines), fontsize="small")
        axes.grid(alpha=0.3)
    names = ["fastformer", *sides]
    handles = [Line2D([], [], marker="o", markersize=4, **styles[side]) for side in names]
    labels = [frames.plain(side) for side in names]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(names), 2 * columns), fontsize="small")
    frames.set_title(figure, title)
    return figure


def _wrapped(text: str, width: int = 46) -> list[str]:
    return [frames.plain(line) for line in textwrap.wrap(frames.visible(text), width)]
