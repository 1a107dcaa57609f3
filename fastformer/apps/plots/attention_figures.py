"""Attention maps: one head, the heads of a layer, the layers of a stack.

A map has a row for each query and a column for each key: row t is how position t spreads over the positions that it
may attend to, 0 to 1, and all maps of a figure have the same scale.

Letters: L layers, H heads, T query positions, S key positions.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastformer.apps.plots.figure import grid, label_inches, magnification, new_figure, set_ticks, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXIS_NAMES = ("source token", "target token")  # of the keys, of the queries
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
    _check_shape(weights, ["T", "S"], source_tokens, target_tokens)
    return _panels(weights[None], [""], 1, source_tokens, target_tokens, title, axis_names)


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
    _check_shape(weights, ["H", "T", "S"], source_tokens, target_tokens)
    columns = math.ceil(len(weights) / max(1, math.isqrt(len(weights))))
    names = [f"head {head + 1}" for head in range(len(weights))]
    return _panels(weights, names, columns, source_tokens, target_tokens, title, axis_names)


def plot_attention_layers(
    weights: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = _AXIS_NAMES,
) -> "Figure":
    """The attention maps of all layers, side by side on one scale; see `plot_attention`.

    Args:
        weights: `[L, H, T, S]`, a row of panels a layer; or `[L, T, S]`, one panel a layer, such as the mean of its
            heads or one of them.
        source_tokens: the S keys. Where a panel is too small for all labels, it has every n-th.
        target_tokens: the T queries.
        title: of the figure.
        axis_names: of the keys and of the queries.

    Raises:
        ValueError: the shape of weights is not that of the tokens.
    """
    _check_shape(weights, ["L", "H", "T", "S"][-max(3, weights.dim()) :], source_tokens, target_tokens)
    if weights.dim() == 3:
        columns = math.ceil(len(weights) / max(1, math.isqrt(len(weights))))
        names = [f"layer {layer + 1}" for layer in range(len(weights))]
    else:
        columns = weights.shape[1]
        names = [f"layer {i + 1}, head {j + 1}" for i in range(len(weights)) for j in range(columns)]
        weights = weights.flatten(0, 1)
    return _panels(weights, names, columns, source_tokens, target_tokens, title, axis_names)


def _panels(
    weights: Tensor,
    names: Sequence[str],
    columns: int,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str,
    axis_names: tuple[str, str],
) -> "Figure":
    """One panel for each of weights `[N, T, S]`, in rows of `columns`."""
    count = len(weights)
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
    for number, axes in enumerate(panels):
        image = _map(axes, weights[number])
        # Only the outer panels carry tokens: every panel of a column and of a row has the same.
        set_ticks(axes, "x", source_tokens if number + columns >= count else (), width)
        set_ticks(axes, "y", target_tokens if number % columns == 0 else (), height)
        axes.set_title(names[number], fontsize="small")
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


def _check_shape(weights: Tensor, letters: list[str], source: Sequence[str], target: Sequence[str]) -> None:
    expected = [len(target), len(source)]
    if weights.dim() != len(letters) or list(weights.shape[-2:]) != expected or 0 in weights.shape:
        wanted = ", ".join(map(str, [*letters[:-2], *expected]))
        raise ValueError(f"weights has shape {list(weights.shape)}; the tokens ask for [{wanted}], none of them 0")
