"""Draw a bar chart of the ratios of a result. The picture carries the digest of the result, for a test."""

import hashlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import CommittedResult, Row
from fastformer.apps.plots import figure as frames

PREFIX = "benchmarks-"
_BARS = 40  # rows with a bar each; of more rows, a bar a competitor
_DIGEST = "Source"  # one of the names of texts that PNG defines


def bars_name(result: CommittedResult) -> str:
    """Return the file name of the chart of all ratios."""
    return f"{PREFIX}{result.name}.png"


def digest(result: CommittedResult) -> str:
    """Return the digest that the pictures of a result carry."""
    return hashlib.sha256(result.model_dump_json().encode()).hexdigest()[:16]


def digest_of(path: Path) -> str | None:
    """Return the digest that a picture carries."""
    from PIL import Image

    with Image.open(path) as picture:
        text = picture.info.get(_DIGEST)
    return None if text is None else str(text)


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


def draw(result: CommittedResult, folder: Path) -> Path:
    """Draw the chart of a result.

    Raises:
        ImportError: matplotlib is missing.
    """
    title = f"{result.name}: {result.machine.get('gpu', result.machine['processor'])}, {result.machine['date']}"
    path = folder / bars_name(result)
    figure = _draw_bars(bars(result.rows), title)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=frames.DPI, format="png", metadata={_DIGEST: digest(result)})
    return path


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
