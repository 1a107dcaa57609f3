"""Learning curves of one or several runs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastformer.apps.plots.figure import font_families, grid, new_figure, plain, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe-Ito palette, distinguishable with colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^v"  # the next seven runs have the same colours and other points
_LONGEST_NAME = 48
_LABELS = {
    "loss": "loss (nats per token)",
    "perplexity": "validation perplexity",
    "bleu": "validation BLEU (percent)",
    "chrf": "validation chrF (percent)",
}
_COUNTS = ("step", "epoch", "seconds")

Record = Mapping[str, Any]


def plot_history(histories: Mapping[str, Sequence[Record]]) -> "Figure":
    """Draw loss, perplexity and every other validation value over the steps: one panel each, one colour a run.

    Args:
        histories: {name of a run: records of the run}, as `fastformer.apps.train.read_metrics` returns them. Records of
            kind "train" are drawn as thin lines, records of kind "validation" with points.

    Raises:
        ValueError: there is nothing to draw.
    """
    names = {name for records in histories.values() for record in records for name in _plottable(record)}
    panels = sorted(names, key=lambda name: (list(_LABELS).index(name) if name in _LABELS else len(_LABELS), name))
    if not panels:
        raise ValueError("histories holds no record with a loss, perplexity or score; nothing to plot")
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    several = len(histories) > 1
    figure = new_figure(5.2 * columns, 3.9 * rows + (0.3 + 0.25 * len(histories) if several else 0.0))
    for axes, name in zip(grid(figure, rows, columns, len(panels)), panels, strict=True):
        for number, (run, records) in enumerate(histories.items()):
            _draw_run(axes, f"{run}, " if several else "", number, records, name)
        if name == "perplexity":
            _logarithmic(axes)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(plain(_LABELS.get(name) or f"validation {shorten(name, _LONGEST_NAME)}"))
        axes.xaxis.set_major_formatter("{x:,.6g}")
        axes.grid(alpha=0.25)
        if not several:
            axes.legend(fontsize="small", frameon=False)
    if several:
        _legend(figure, list(histories))
    return figure


def _legend(figure: "Figure", runs: Sequence[str]) -> None:
    """Draw one legend below all panels: the colour and points of each run, and what thin lines and points mean."""
    from matplotlib.lines import Line2D

    names = [*(_name(run) for run in runs), "thin: training", "points: validation"]
    handles = [Line2D([], [], **_style(number)) for number in range(len(runs))]
    handles += [Line2D([], [], color="gray", linewidth=0.8), Line2D([], [], color="gray", marker="o", markersize=3.5)]
    columns = max(1, min(len(names), int(figure.get_figwidth() * 12 / (max(map(len, names)) + 6))))
    font = {"family": font_families(), "size": "small"}
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, prop=font)


def _name(run: str) -> str:
    """Return a run's name as a label: the end of a long path tells runs apart."""
    name = visible(run)
    name = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
    return plain(f" {name}" if name.startswith("_") else name)  # matplotlib hides labels that begin with _


def _style(number: int) -> dict[str, Any]:
    marker = _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.6, "marker": marker, "markersize": 3.5}


def _plottable(record: Record) -> list[str]:
    numbers = [n for n, v in record.items() if n not in _COUNTS and isinstance(v, int | float)]
    if record.get("kind") == "train":
        return [n for n in numbers if n == "loss"]
    return numbers if record.get("kind") == "validation" else []


def _draw_run(axes: "Axes", prefix: str, number: int, records: Sequence[Record], name: str) -> None:
    style = _style(number)
    thin = {"color": style["color"], "linewidth": 0.8, "alpha": 0.6}
    for kind, label, look in (("train", "training", thin), ("validation", "validation", style)):
        points = [(x["step"], x[name]) for x in records if x.get("kind") == kind and name in _plottable(x)]
        if points:
            axes.plot(*zip(*points, strict=True), **look, label=f"{prefix}{label}")


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    if low > 0 and high / low > 2:  # else a logarithmic axis would have no tick labels
        subs = (1.0, 2.0, 5.0) if high / low > 10 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:,.6g}")
