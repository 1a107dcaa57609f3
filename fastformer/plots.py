"""Figures of training runs, attention maps and positional encodings.

Every function returns a `matplotlib.figure.Figure` that belongs to nobody else: pyplot, its global state and its
choice of a window system are never touched, so the figures work in a server, a notebook and a thread alike. matplotlib
is imported when the first figure is drawn. `save` writes a PNG.

Colours: the Okabe-Ito palette, which people with colour-blindness can tell apart, and viridis for values.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DPI = 120
_MAX_LABEL = 24
_INCHES_PER_LABEL = 0.14
_CHARACTERS_PER_INCH = 9.0
_LABELS = {
    "loss": "loss (nats per token)",
    "perplexity": "validation perplexity",
    "bleu": "validation BLEU (percent)",
    "chrf": "validation chrF (percent)",
}

Record = Mapping[str, Any]


def save(figure: "Figure", path: Path | str) -> Path:
    """Write a figure as PNG and give back its path; folders are made as needed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, format="png")
    return path


def plot_history(histories: Mapping[str, Sequence[Record]]) -> "Figure":
    """Loss, perplexity and every other validation value over the steps, one panel each, one colour a run.

    histories: {name of the run: its records}, as `fastformer.train.read_metrics` gives them: records of kind "train"
    are drawn thin, of kind "validation" with points. Raises ValueError when there is nothing to draw.
    """
    values = [name for records in histories.values() for record in records for name in _plottable(record)]
    panels = sorted(dict.fromkeys(values), key=lambda name: list(_LABELS).index(name) if name in _LABELS else 99)
    if not panels:
        raise ValueError("histories holds no record with a loss, perplexity or score; nothing to plot")
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    figure = _figure(5.2 * columns, 3.9 * rows)
    for axes, name in zip(_grid(figure, rows, columns, len(panels)), panels, strict=True):
        for number, (run, records) in enumerate(histories.items()):
            _draw_run(axes, f"{run}, " if len(histories) > 1 else "", _COLOURS[number % len(_COLOURS)], records, name)
        if name == "perplexity":
            _logarithmic(axes)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(_LABELS.get(name, f"validation {name}"))
        axes.xaxis.set_major_formatter(_thousands())
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small", frameon=False)
    return figure


def plot_attention(
    weights: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], title: str = ""
) -> "Figure":
    """One attention map. weights [T, S]: row t is how target position t spreads over the source positions, 0 to 1.

    Raises ValueError when the shape is not [len(target_tokens), len(source_tokens)].
    """
    _check_shape(weights, ["T", "S"], source_tokens, target_tokens)
    width, height = _extent(source_tokens, 0.32, 1.6, 30.0), _extent(target_tokens, 0.28, 1.4, 30.0)
    figure = _figure(width + 2.4, height + 1.6)
    (axes,) = _grid(figure, 1, 1, 1)
    image = _map(axes, weights)
    _tick(axes.set_xticks, source_tokens, width, rotation=90)
    _tick(axes.set_yticks, target_tokens, height)
    axes.set_xlabel("source token")
    axes.set_ylabel("target token")
    _title(figure, title)
    figure.colorbar(image, ax=axes, label="attention weight", fraction=0.05, pad=0.03)
    return figure


def plot_attention_heads(
    weights: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], title: str = ""
) -> "Figure":
    """The attention maps of one layer's heads, side by side on one scale. weights [H, T, S].

    Raises ValueError when the shape is not [H, len(target_tokens), len(source_tokens)].
    """
    _check_shape(weights, ["H", "T", "S"], source_tokens, target_tokens)
    heads = len(weights)
    rows = max(1, math.isqrt(heads))
    columns = math.ceil(heads / rows)
    width, height = _extent(source_tokens, 0.22, 1.6, 9.0), _extent(target_tokens, 0.2, 1.4, 9.0)
    figure = _figure(columns * width + 2.2, rows * height + 1.8)
    panels = _grid(figure, rows, columns, heads)
    for head, axes in enumerate(panels):
        image = _map(axes, weights[head])
        # Only the outer panels carry tokens: every panel of a column and of a row has the same.
        _tick(axes.set_xticks, source_tokens if head + columns >= heads else (), width, rotation=90)
        _tick(axes.set_yticks, target_tokens if head % columns == 0 else (), height)
        axes.set_title(f"head {head + 1}", fontsize="small")
    figure.supxlabel("source token", fontsize="medium")
    figure.supylabel("target token", fontsize="medium")
    _title(figure, title)
    figure.colorbar(image, ax=panels, label="attention weight", fraction=0.03, pad=0.02)
    return figure


def plot_positions(encoding: Tensor, title: str = "") -> "Figure":
    """A positional encoding, its values and the cosine similarity of its positions. encoding [T, D]."""
    if encoding.dim() != 2 or 0 in encoding.shape:
        raise ValueError(f"encoding has shape {list(encoding.shape)}; it must be [T, D], both at least 1")
    values = encoding.detach().float().cpu()
    figure = _figure(11.0, 4.4)
    left, right = _grid(figure, 1, 2, 2)
    limit = float(values.abs().max()) or 1.0
    image = left.imshow(values.numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    left.set_xlabel("dimension")
    left.set_ylabel("position")
    left.set_title("value of each dimension")
    figure.colorbar(image, ax=left, label="value")
    normal = torch.nn.functional.normalize(values, dim=1)
    similarity = normal @ normal.T  # [T, T]
    image = right.imshow(similarity.numpy(), cmap="viridis", interpolation="nearest")
    right.set_xlabel("position")
    right.set_ylabel("position")
    right.set_title("similarity of positions")
    figure.colorbar(image, ax=right, label="cosine similarity")
    _title(figure, title)
    return figure


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'fastformer[apps]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def _grid(figure: "Figure", rows: int, columns: int, count: int) -> "list[Axes]":
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def _title(figure: "Figure", title: str) -> None:
    figure.suptitle(_plain(textwrap.fill(title, int(figure.get_figwidth() * _CHARACTERS_PER_INCH))))


def _map(axes: "Axes", weights: Tensor) -> Any:
    values = weights.detach().float().cpu().numpy()
    axes.tick_params(length=2)
    return axes.imshow(values, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest")


def _extent(tokens: Sequence[str], each: float, least: float, most: float) -> float:
    """Inches for a row of tokens."""
    return min(max(each * len(tokens), least), most)


def _tick(set_ticks: Callable[..., Any], tokens: Sequence[str], inches: float, rotation: int = 0) -> None:
    """Label positions with tokens; of a sentence too long for the space, every n-th so that none overlap."""
    stride = math.ceil(len(tokens) * _INCHES_PER_LABEL / inches) or 1
    labels = [_plain(_shorten(token)) for token in tokens[::stride]]
    set_ticks(range(0, len(tokens), stride), labels=labels, rotation=rotation, fontsize="small")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would begin a formula


def _shorten(token: str) -> str:
    return token if len(token) <= _MAX_LABEL else token[: _MAX_LABEL - 1] + "…"


def _plottable(record: Record) -> list[str]:
    if record.get("kind") == "train":
        return ["loss"] if "loss" in record else []
    if record.get("kind") != "validation":
        return []
    return [n for n, v in record.items() if n not in ("step", "epoch", "seconds") and isinstance(v, int | float)]


def _draw_run(axes: "Axes", prefix: str, colour: str, records: Sequence[Record], name: str) -> None:
    steps, values = _series(records, "train", name)
    if steps:
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.6, label=f"{prefix}training")
    steps, values = _series(records, "validation", name)
    if steps:
        axes.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=3.5, label=f"{prefix}validation")


def _series(records: Sequence[Record], kind: str, name: str) -> tuple[list[float], list[float]]:
    found = [record for record in records if record.get("kind") == kind and name in _plottable(record)]
    return [record["step"] for record in found], [record[name] for record in found]


def _logarithmic(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(_thousands())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.6g}")


def _check_shape(weights: Tensor, letters: list[str], source: Sequence[str], target: Sequence[str]) -> None:
    expected = [len(target), len(source)]
    if weights.dim() != len(letters) or list(weights.shape[-2:]) != expected or 0 in weights.shape:
        wanted = ", ".join(map(str, [*letters[:-2], *expected]))
        raise ValueError(f"weights has shape {list(weights.shape)}; the tokens ask for [{wanted}], none of them 0")
