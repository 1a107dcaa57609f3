"""Figures of training runs and positional encodings, and what all figures share: size, title and file."""

import io
import logging
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import normalize

from fastformer.apps.system.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger("fastformer")
DPI = 120
# On Linux, macOS and Windows: Chinese, Japanese and Korean; Arabic and Thai; Indian scripts.
_OTHER_FONTS = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Hiragino Sans", "PingFang SC", "Apple SD Gothic Neo",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Arabic", "Noto Sans Thai", "Noto Sans Devanagari",
    "Arial Unicode MS", "Nirmala UI", "Leelawadee UI",
)  # fmt: skip
_CHARACTERS_PER_INCH = 9.0  # of a title
_LABELS = {
    "loss": "loss (mean, in nats)",
    "perplexity": "validation perplexity",
    "bleu": "validation BLEU (percent)",
    "chrf": "validation chrF (percent)",
}
_COUNTS = ("step", "epoch", "seconds")

Record = Mapping[str, Any]


def check_png(path: Path | str) -> None:
    """Raise ValueError for a figure whose name does not end in .png."""
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"{path}: the name of a figure must end in .png")


def save(figure: "Figure", path: Path | str) -> Path:
    """Write a figure as PNG, completely or not at all, and return the path; folders are created.

    Raises ``ValueError`` for a name that does not end in .png.
    """
    check_png(path)
    path, drawn = Path(path), io.BytesIO()
    _set_fonts(figure)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(drawn, dpi=DPI, format="png")
    missing = [each for each in caught if "missing from font" in str(each.message)]
    for each in caught:
        if each not in missing:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        logger.warning("%s: no installed font has all letters, so boxes stand for some; Noto Sans CJK has more", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, drawn.getvalue())
    return path


def _set_fonts(figure: "Figure") -> None:
    """Let installed fonts of other scripts draw the letters that matplotlib's own font does not have."""
    from matplotlib.font_manager import fontManager
    from matplotlib.text import Text

    installed = {font.name for font in fontManager.ttflist}
    others = [name for name in _OTHER_FONTS if name in installed]
    for text in figure.findobj(Text):
        text.set_fontfamily([*text.get_fontfamily(), *others])


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of `width` x `height` inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'fastformer[apps]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def grid(figure: "Figure", rows: int, columns: int, count: int) -> "list[Axes]":
    """Return the first `count` of rows x columns panels."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def set_title(figure: "Figure", title: str) -> None:
    """Write a title above the whole figure, in as many lines as its width requires, but at most three."""
    width = int(figure.get_figwidth() * _CHARACTERS_PER_INCH)
    lines = textwrap.fill(title, width, break_on_hyphens=False, max_lines=3, placeholder=" …")
    figure.suptitle(lines, parse_math=False)


def plot_history(histories: Mapping[str, Sequence[Record]]) -> "Figure":
    """Draw loss, perplexity and every other validation value over the steps: one panel each, one colour a run.

    Args:
        histories: {name of a run: records of the run}, as `fastformer.apps.train.read_metrics` returns them. Records of
            kind "train" are drawn as thin lines, records of kind "validation" with points.

    Raises:
        ValueError: there is nothing to draw.
    """
    values = {name for records in histories.values() for record in records for name in _plottable(record)}
    panels = [*(name for name in _LABELS if name in values), *sorted(values - _LABELS.keys())]
    if not panels:
        raise ValueError("histories holds no record with a loss, perplexity or score; nothing to plot")
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    figure = new_figure(5.2 * columns, 3.9 * rows + 0.4 * len(histories) + 0.3)
    styles: dict[str, dict[str, Any]] = {
        "train": {"linewidth": 0.8, "alpha": 0.6},
        "validation": {"marker": "o", "markersize": 3.5},
    }
    lines = {}
    for axes, name in zip(grid(figure, rows, columns, len(panels)), panels, strict=True):
        for number, (run, records) in enumerate(histories.items()):
            for kind, style in styles.items():
                points = [(x["step"], x[name]) for x in records if x.get("kind") == kind and name in _plottable(x)]
                if points:
                    (lines[f"{kind}: {run}"],) = axes.plot(*zip(*points, strict=True), color=f"C{number}", **style)
        low, high = axes.dataLim.intervaly
        if name == "perplexity" and high > 2 * low > 0:  # a logarithmic axis of a shorter range has no numbers
            axes.set_yscale("log")
        axes.set(xlabel="optimiser step", ylabel=_LABELS.get(name, f"validation {name}"))
        axes.grid(alpha=0.25)
    legend = figure.legend(
        list(lines.values()), list(lines), loc="outside lower center", frameon=False, fontsize="small"
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _plottable(record: Record) -> list[str]:
    numbers = [n for n, v in record.items() if n not in _COUNTS and isinstance(v, int | float)]
    if record.get("kind") == "train":
        return [n for n in numbers if n == "loss"]
    return numbers if record.get("kind") == "validation" else []


def plot_positions(encoding: Tensor, title: str = "") -> "Figure":
    """Draw a positional encoding `[T, D]` and the cosine similarity of positions.

    Raises ``ValueError`` if encoding does not have two dimensions, or one has size 0.
    """
    if encoding.dim() != 2 or 0 in encoding.shape:
        raise ValueError(f"encoding has shape {list(encoding.shape)}; it must be [T, D], both at least 1")
    values = encoding.detach().float().cpu()
    similarity = normalize(values, dim=1) @ normalize(values, dim=1).T
    limit = float(values.abs().max()) or 1.0
    figure = new_figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    for axes, image, label, options in (
        (left, values, "value", {"aspect": "auto", "cmap": "RdBu_r", "vmin": -limit, "vmax": limit}),
        (right, similarity, "cosine similarity", {"cmap": "viridis"}),
    ):
        drawn = axes.imshow(image.numpy(), interpolation="nearest", **options)
        figure.colorbar(drawn, ax=axes, label=label)
    left.set(xlabel="dimension", ylabel="position", title="value of each dimension")
    right.set(xlabel="position", ylabel="position", title="similarity of positions")
    set_title(figure, title)
    return figure
