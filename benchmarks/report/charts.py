"""Draw charts of results: a bar a ratio, and lines of how time or memory grows with length, batch, width or padding.

Each picture carries the digest of its result, by which a test finds outdated pictures.
"""

import hashlib
import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.record import Row
from benchmarks.report.results import CommittedResult
from fastformer.apps.plots import figure as frames

PREFIX = "benchmarks-"
_BARS = 40  # rows with a bar each; of more rows, a bar a competitor
_PANELS = 12  # of a scaling chart; further families of cases are in the tables
_DIGEST = "Source"  # one of the names of texts that PNG defines
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?k?")
_POINTS = 3  # fewer points make no line of growth


class Panel(NamedTuple):
    """How time or memory grows along an axis.

    `lines` has the points (value of the axis, multiple of fastformer's cost at the lowest value) of each side, and
    `out_of_memory` the values at which a side ran out of memory.
    """

    title: str
    axis: str
    quantity: str
    lines: dict[str, list[tuple[float, float]]]
    out_of_memory: dict[str, list[float]]


def bars_name(result: CommittedResult) -> str:
    """Return the file name of the chart of all ratios."""
    return f"{PREFIX}{result.name}.png"


def scaling_names(result: CommittedResult) -> dict[str, str]:
    """Return the file names of the scaling charts, by benchmark."""
    return {
        benchmark: f"{PREFIX}{result.name}-{benchmark.replace('_', '-')}-scaling.png"
        for benchmark, rows in result.by_benchmark().items()
        if panels(rows)
    }


def digest(result: CommittedResult) -> str:
    """Return the digest that the pictures of a result carry."""
    return hashlib.sha256(result.model_dump_json().encode()).hexdigest()[:16]


def digest_of(path: Path) -> str | None:
    """Return the digest that a picture carries."""
    from PIL import Image

    with Image.open(path) as picture:
        found = picture.info.get(_DIGEST)
    return None if found is None else str(found)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return exp of the mean of the logarithms."""
    return math.exp(statistics.mean(math.log(ratio) for ratio in ratios))


def bars(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each bar by its label: one row, or if there are many, all rows against a competitor."""
    timed = [row for row in rows if row.ratio is not None]
    groups: dict[str, list[Row]] = {}
    for row in timed:
        single = f"{row.case}\nagainst {row.against}"
        label = single if len(timed) <= _BARS else f"{row.benchmark.replace('_', ' ')}\nagainst {row.against}"
        groups.setdefault(label, []).append(row)
    if len(timed) <= _BARS:
        return groups
    return {f"{label}, {len(group)} case{'s' * (len(group) > 1)}": group for label, group in groups.items()}


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return panels for the families of cases that differ in one number of `at`; time first, then memory.

    Cases are of one family if their names are equal apart from that number. It needs three values.
    """
    found = []
    for quantity in ("time", "peak memory"):
        families: dict[tuple[str, str], list[tuple[float, Row]]] = {}
        for row in rows:
            for axis, value in row.at.items():
                if title := family(row.case, axis, value):
                    families.setdefault((axis, title), []).append((value, row))
        for (axis, title), members in families.items():
            if panel := _panel(title, axis, quantity, members):
                found.append(panel)
    return found


def family(case: str, axis: str, value: float) -> str | None:
    """Return the name with "…" for the number on the axis: "layer norm 8,192 x 1,024" -> "layer norm … x 1,024".

    Return None if the name lacks that number.
    """

    def matches(text: str) -> bool:
        number = float(text.rstrip("k").replace(",", ""))
        meant = (number * 1000, number * 1024) if text.endswith("k") else (number, number / 100)
        return any(math.isclose(value, one, rel_tol=6e-3) for one in meant)

    found = [match for match in _NUMBER.finditer(case) if matches(match[0])]
    named = [match for match in found if case[: match.start()].rstrip().endswith(axis)]
    if not found:
        return None
    match = (named or found)[0]
    return f"{case[: match.start()]}…{case[match.end() :]}"


def _panel(title: str, axis: str, quantity: str, members: Sequence[tuple[float, Row]]) -> Panel | None:
    costs: dict[str, dict[float, list[float]]] = {}
    out_of_memory: dict[str, list[float]] = {}
    for value, row in members:
        if quantity == "time":
            amounts: Any = [t and t / n for t, n in zip((row.ours, row.theirs), row.tokens, strict=True)]
        else:
            amounts = row.peak_bytes or (None, None)
        for side, amount in zip(("fastformer", row.against), amounts, strict=True):
            if amount:
                costs.setdefault(side, {}).setdefault(value, []).append(amount)
        if row.status.endswith("out of memory"):
            side = "fastformer" if row.status.startswith("fastformer") else row.against
            out_of_memory.setdefault(side, []).append(value)
    ours = costs.get("fastformer", {})
    if len(ours) < _POINTS:
        return None
    unit = statistics.median(ours[min(ours)])
    if quantity == "time":
        quantity += f" per {'token' if any(row.tokens[0] > 1 for _, row in members) else 'call'}"
    lines = {
        side: [(value, statistics.median(points[value]) / unit) for value in sorted(points)]
        for side, points in costs.items()
    }
    return Panel(title, axis, quantity, lines, {side: sorted(set(values)) for side, values in out_of_memory.items()})


def draw(result: CommittedResult, folder: Path) -> list[Path]:
    """Draw all charts of a result.

    Raises:
        ImportError: matplotlib is missing.
    """
    title = f"{result.name}: {result.machine.get('gpu', result.machine['processor'])}, {result.machine['date']}"
    figures = {bars_name(result): _draw_bars(bars(result.rows), title)}
    groups = result.by_benchmark()
    for benchmark, name in scaling_names(result).items():
        figures[name] = _draw_panels(panels(groups[benchmark])[:_PANELS], f"{benchmark.replace('_', ' ')}, {title}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=frames.DPI, format="png", metadata={_DIGEST: digest(result)})
    return [folder / name for name in figures]


def _draw_bars(bars: dict[str, list[Row]], title: str) -> Any:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = frames.new_figure(10, 1.6 + 0.38 * max(len(bars), 2))
    axes = figure.subplots()
    ends = [1.0]
    for y, rows in enumerate(bars.values()):
        ratios = [row.ratio for row in rows if row.ratio is not None]
        goals = {row.goal for row in rows}
        goal = goals.pop() if len(goals) == 1 else None
        missed = [row.missed for row in rows if row.goal is not None]
        mean, worst, best = geometric_mean(ratios), min(ratios), max(ratios)
        color = "tab:blue" if not any(missed) else "tab:red" if all(missed) else "tab:orange"
        axes.barh(y, mean - 1, left=1, height=0.62, color=color, alpha=0.85)
        if worst < best:
            axes.plot([worst, best], [y, y], color="black", linewidth=1, marker="|", markersize=6)
        if goal is not None:
            axes.plot([goal] * 2, [y - 0.42, y + 0.42], color="black", linewidth=2)
        text = f"{mean:.2f}" if worst == best else f"mean {mean:.2f}"
        place = (max(best, goal or 0, 1.0), y)
        axes.annotate(text, place, (5, 0), textcoords="offset points", va="center", fontsize="small", color=color)
        ends += [worst, best, goal or 1.0]
    lowest, highest = min(ends) / 1.15, max(ends)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(lowest, highest * (highest / lowest) ** 0.2)  # space for the last number
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks(range(len(bars)), labels=[frames.plain(label) for label in bars], fontsize=7.5, linespacing=1.15)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    legend = "competitor's time / fastformer's: right of 1 fastformer is faster\n"
    legend += "black mark: goal; red: missed, orange: in some cases; thin line: worst to best"
    axes.set_xlabel(legend, fontsize="small")
    frames.set_title(figure, title)
    return figure


def _draw_panels(panels: Sequence[Panel], title: str) -> Any:
    from matplotlib.ticker import FuncFormatter, NullLocator

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = frames.new_figure(max(4.3 * columns, 5.5), 0.9 + 3.6 * rows)
    sides = ["fastformer", *dict.fromkeys(side for panel in panels for side in panel.lines if side != "fastformer")]
    for axes, panel in zip(frames.grid(figure, rows, columns, len(panels)), panels, strict=True):
        for side, points in panel.lines.items():
            style: Any = {"linewidth": 2.5} if side == "fastformer" else {"linestyle": "--"}
            label = frames.plain(side)
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                color=f"C{sides.index(side)}",
                label=label,
                **style,
            )
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
        texts = [panel.title]
        for side, full in panel.out_of_memory.items():
            texts.append(f"{side}: out of memory at {', '.join(f'{value:,g}' for value in full)}")
        lines = [frames.plain(line) for text in texts for line in textwrap.wrap(frames.visible(text), 46)]
        axes.set_title("\n".join(lines), fontsize="small")
        axes.grid(alpha=0.3)
    known = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        known.values(), known.keys(), loc="outside lower center", ncols=min(len(known), 2 * columns), fontsize="small"
    )
    frames.set_title(figure, title)
    return figure
