"""Attention maps: one head, the heads of a layer, the layers of a stack.

A map has a row for each query and a column for each key: row t is how position t spreads over the positions that it
may attend to, 0 to 1, and all maps of a figure have the same scale.

Letters: L layers, H heads, T query positions, S key positions.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastformer.apps.plots.figure import grid, label_inches, magnification, new_figure, set_ticks, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXIS_NAMES = ("source token", "target token")  # of the keys, of the queries
_PANELS = {"L": "layer", "H": "head"}
_BAR = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # numbers on the colour bar
_LARGEST = 24.0  # inches of all panels of a grid side by side, as long as that leaves each its least


def plot_attention(
    weights: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = _AXIS_NAMES,
) -> "Figure":
    """One attention map.

    Args:
        weights: `[T, S]`.
        source_tokens: the S keys.
        target_tokens: the T queries.
        title: of the figure.
        axis_names: of the keys and of the queries; for a self-attention, say.

    Raises:
        ValueError: the shape of weights is not that of the tokens.
    """
    return _figure(weights, "TS", source_tokens, target_tokens, title, axis_names)


def plot_attention_heads(
    weights: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = _AXIS_NAMES,
) -> "Figure":
    """The attention maps of one layer's heads, side by side on one scale. weights `[H, T, S]`; see `plot_attention`.

    Raises:
        ValueError: the shape of weights is not that of the tokens.
    """
    return _figure(weights, "HTS", source_tokens, target_tokens, title, axis_names)


def plot_attention_layers(
    weights: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = _AXIS_NAMES,
) -> "Figure":
    """The attention maps of all layers, side by side on one scale; see `plot_attention`.

    weights `[L, H, T, S]`: a row of panels a layer; or `[L, T, S]`: one panel a layer, such as the mean of its heads or
    one of them. Where a panel is too small for all labels, it has every n-th.

    Raises:
        ValueError: the shape of weights is not that of the tokens.
    """
    letters = "LTS" if weights.dim() < 4 else "LHTS"
    return _figure(weights, letters, source_tokens, target_tokens, title, axis_names)


def _figure(
    weights: Tensor,
    letters: str,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str,
    axis_names: tuple[str, str],
) -> "Figure":
    """One panel for each of the maps; the letters name the dimensions of weights."""
    tokens = [len(target_tokens), len(source_tokens)]
    if weights.dim() != len(letters) or list(weights.shape[-2:]) != tokens or 0 in weights.shape:
        wanted = ", ".join(map(str, [*letters[:-2], *tokens]))
        raise ValueError(f"weights has shape {list(weights.shape)}; the tokens ask for [{wanted}], none of them 0")
    sizes = weights.shape[:-2]  # one map, panels, or rows of panels
    count = math.prod(sizes)
    columns = sizes[1] if len(sizes) == 2 else math.ceil(count / math.isqrt(count))
    rows = math.ceil(count / columns)
    across, down = (0.32, 0.28) if count == 1 else (0.22, 0.2)  # inches a token
    width = _extent(source_tokens, across, 1.6, max(1.6, _LARGEST / columns))
    height = _extent(target_tokens, down, 1.4, max(1.4, min(_LARGEST / rows, 2 * width)))
    # Beside the panels: the labels, the name of the axis and the colour bar; above each, its name.
    figure = new_figure(
        columns * (width + 0.1) + label_inches(target_tokens) + 1.6,
        rows * (height + 0.3) + label_inches(source_tokens) + 0.9,
    )
    panels = grid(figure, rows, columns, count)
    for number, (index, axes) in enumerate(zip(product(*map(range, sizes)), panels, strict=True)):
        image = _map(axes, weights[index])
        # Only the outer panels carry tokens: every panel of a column and of a row has the same.
        set_ticks(axes, "x", source_tokens if number + columns >= count else (), width)
        set_ticks(axes, "y", target_tokens if number % columns == 0 else (), height)
        name = ", ".join(f"{_PANELS[letter]} {i + 1}" for letter, i in zip(letters, index, strict=False))
        axes.set_title(name, fontsize="small")
    size = 10 * magnification(figure)
    figure.supxlabel(axis_names[0], fontsize=size)
    figure.supylabel(axis_names[1], fontsize=size)
    set_title(figure, title)
    # As thick as a line of text is high, whatever the height of the figure. Its numbers are fixed: matplotlib chooses
    # them after the layout, and "0.25", where the layout has seen "0.2", pushed the label over the edge.
    bar = figure.colorbar(
        image, ax=panels, fraction=0.03, pad=0.02, aspect=max(20, 4 * figure.get_figheight()), ticks=_BAR, format="%.1f"
    )
    bar.set_label("attention weight", fontsize=size)
    return figure


def _map(axes: "Axes", weights: Tensor) -> Any:
    values = weights.detach().float().cpu().numpy()
    axes.tick_params(length=2)
    return axes.imshow(values, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest")


def _extent(tokens: Sequence[str], each: float, least: float, most: float) -> float:
    """Inches for a row of tokens."""
    return min(max(each * len(tokens), least), most)
