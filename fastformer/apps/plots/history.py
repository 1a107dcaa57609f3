"""Learning curves of one or several runs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastformer.apps.plots.figure import font_families, grid, new_figure, plain, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The Okabe-Ito palette, distinguishable with colour blindness.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
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
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    values = {name for records in histories.values() for record in records for name in _plottable(record)}
    panels = [*(name for name in _LABELS if name in values), *sorted(values - _LABELS.keys())]
    if not panels:
        raise ValueError("histories holds no record with a loss, perplexity or score; nothing to plot")
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    figure = new_figure(5.2 * columns, 3.9 * rows + 0.25 * len(histories) + 0.3)
    for axes, name in zip(grid(figure, rows, columns, len(panels)), panels, strict=True):
        for number, records in enumerate(histories.values()):
            thin = {"color": _style(number)["color"], "linewidth": 0.8, "alpha": 0.6}
            for kind, style in (("train", thin), ("validation", _style(number))):
                points = [(x["step"], x[name]) for x in records if x.get("kind") == kind and name in _plottable(x)]
                if points:
                    axes.plot(*zip(*points, strict=True), **style)
        low, high = axes.dataLim.intervaly
        if name == "perplexity" and high > 2 * low > 0:  # a logarithmic axis of a shorter range has no numbers
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter("{x:,.6g}")
        axes.set(xlabel="optimiser step", ylabel=_LABELS.get(name, plain(f"validation {visible(name)}")))
        axes.xaxis.set_major_formatter("{x:,.6g}")
        axes.grid(alpha=0.25)
    names = [*map(_shorten, histories), "thin: training", "points: validation"]
    handles = [Line2D([], [], **_style(number)) for number in range(len(histories))]
    handles += [Line2D([], [], color="gray", linewidth=0.8), Line2D([], [], color="gray", marker="o", markersize=3.5)]
    across = max(1, min(len(names), int(figure.get_figwidth() * 12 / (max(map(len, names)) + 6))))
    font = {"family": font_families(), "size": "small"}
    figure.legend(handles, names, loc="outside lower center", ncols=across, frameon=False, prop=font)
    return figure


def _shorten(run: str) -> str:
    """Return a run's name as a label: the end of a long path tells runs apart."""
    name = visible(run)
    name = name if len(name) <= _LONGEST_NAME else "…" + name[1 - _LONGEST_NAME :]
    return plain(f" {name}" if name.startswith("_") else name)  # matplotlib hides labels that begin with _


def _style(number: int) -> dict[str, Any]:
    marker = "osD^v"[number // len(_COLOURS) % 5]  # the next seven runs have the same colours and other points
    return {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.6, "marker": marker, "markersize": 3.5}


def _plottable(record: Record) -> list[str]:
    numbers = [n for n, v in record.items() if n not in _COUNTS and isinstance(v, int | float)]
    if record.get("kind") == "train":
        return [n for n in numbers if n == "loss"]
    return numbers if record.get("kind") == "validation" else []
