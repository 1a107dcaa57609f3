"""Attention maps: every attention weight for a text, and figures of one head, the heads of a layer, or all layers.

Letters: L layers, H heads, T query positions (of a translation: of the target), S key positions (of the source).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fastformer.apps.plots.figure import grid, new_figure, set_title
from fastformer.host.devices import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the colour bar
_MOST_INCHES = 24.0  # of a grid's panels in one direction, unless a panel would be smaller than its minimum
_LONGEST_LABEL = 24  # characters
_INCHES_PER_LINE = 0.14  # of small text, so that adjacent labels do not touch
_INCHES_PER_CHARACTER = 0.085  # of small text, on average


@dataclass(frozen=True)
class AttentionMaps:
    """Every weight of one kind of attention.

    Attributes:
        title: the beginning and the end of a figure's title.
        weights: `[L, H, T, S]`, on the CPU; row t has the weights of query t over the keys.
        keys: the S tokens of the keys.
        queries: the T tokens of the queries.
        axis_names: names for the keys and for the queries.
    """

    title: tuple[str, str]
    weights: Tensor
    keys: list[str]
    queries: list[str]
    axis_names: tuple[str, str]

    def figure(self, layer: int | Literal["all"] | None = None, head: int | Literal["all", "mean"] = "all") -> "Figure":
        """Draw the maps of one head, of the heads of a layer, or of all layers.

        layer: from 1, None for the last one; or "all". head: from 1; or "all", a panel for each; or "mean", their
        average. Raises ``ValueError`` if there is no such layer or head.
        """
        layers, heads = self.weights.shape[:2]
        layer = layers if layer is None else layer
        for name, value, count, words in (("layer", layer, layers, ("all",)), ("head", head, heads, ("all", "mean"))):
            if value not in words and not (isinstance(value, int) and 1 <= value <= count):
                raise ValueError(f"{name} must be 1 to {count} or {' or '.join(words)}, not {value!r}")
        weights, panel_names = self.weights, ["layer", "head"]
        selection = "all layers" if layer == "all" else f"layer {layer}"
        if head != "all":
            panel_names.remove("head")
            selection += f", mean of {heads} heads" if head == "mean" else f", head {head}"
            weights = weights.mean(1) if head == "mean" else weights[:, head - 1]
        if layer != "all":
            panel_names.remove("layer")
            weights = weights[layer - 1]
        begin, end = self.title
        title = f"{begin}, {selection}: {end}"
        return plot_attention(weights, self.keys, self.queries, title, self.axis_names, panel_names)


def attend_ids(model: Any, ids: Sequence[int], tokens: Sequence[str], text: str = "") -> AttentionMaps:
    """Compute every attention weight of a model for the ids of one sequence.

    model: a language model or a classifier; call `.eval()` first, or dropout sets some weights to 0. tokens: a name for
    each id. text: the text in the title; empty: the tokens. Raises ``ValueError`` if there is no id, tokens has another
    length, or the ids exceed the number of learned positions.
    """
    if not len(ids) or len(ids) != len(tokens):
        raise ValueError(f"ids and tokens must be equally many and at least one, not {len(ids)} and {len(tokens)}")
    weights = model.attention_maps(torch.tensor(ids, device=device_of(model))).cpu()
    title = "attention", text or " ".join(tokens)
    return AttentionMaps(title, weights, list(tokens), list(tokens), ("token looked at", "token"))


def plot_attention(
    weights: Tensor,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    title: str = "",
    axis_names: tuple[str, str] = ("source token", "target token"),
    panel_names: Sequence[str] | None = None,
) -> "Figure":
    """Draw attention maps, side by side on one scale from 0 to 1; row t has the weights of query t over the keys.

    If a panel is too small for all labels, every n-th is drawn.

    Args:
        weights: one map `[T, S]`; maps `[H, T, S]`; or rows of maps `[L, H, T, S]`.
        source_tokens: the S keys.
        target_tokens: the T queries.
        title: the title of the figure.
        axis_names: names for the keys and for the queries.
        panel_names: names for the dimensions before `[T, S]`; None: "layer" and "head", or "head".

    Raises:
        ValueError: the shape of weights does not match the numbers of tokens.
    """
    tokens = [len(target_tokens), len(source_tokens)]
    if not 2 <= weights.dim() <= 4 or list(weights.shape[-2:]) != tokens or 0 in weights.shape:
        raise ValueError(
            f"weights must be [T, S], [H, T, S] or [L, H, T, S] with [T, S] = {tokens} for these tokens and no "
            f"dimension of size 0, not {list(weights.shape)}"
        )
    queries, keys = ([_label(token) for token in each] for each in (target_tokens, source_tokens))
    sizes = weights.shape[:-2]  # one map, panels, or rows of panels
    names = ("layer", "head")[2 - len(sizes) :] if panel_names is None else panel_names
    count = math.prod(sizes)
    columns = sizes[1] if len(sizes) == 2 else math.ceil(count / math.isqrt(count))
    rows = math.ceil(count / columns)
    across, down = (0.32, 0.28) if count == 1 else (0.22, 0.2)  # inches a token
    width = min(max(across * len(keys), 1.6), max(1.6, _MOST_INCHES / columns))
    height = min(max(down * len(queries), 1.4), max(1.4, min(_MOST_INCHES / rows, 2 * width)))
    # Beside the panels: the labels, the name of the axis and the colour bar; above each panel, the panel's name.
    figure = new_figure(
        columns * (width + 0.1) + _INCHES_PER_CHARACTER * max(map(len, queries)) + 1.6,
        rows * (height + 0.3) + _INCHES_PER_CHARACTER * max(map(len, keys)) + 0.9,
    )
    panels = grid(figure, rows, columns, count)
    for number, (index, axes) in enumerate(zip(product(*map(range, sizes)), panels, strict=True)):
        values = weights[index].detach().float().cpu().numpy()
        image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0.0, vmax=1.0, interpolation="nearest")
        # Only the outer panels carry tokens: every panel of a column and of a row has the same.
        for axis, labels, inches in (
            (axes.xaxis, keys if number + columns >= count else [], width),
            (axes.yaxis, queries if number % columns == 0 else [], height),
        ):
            stride = max(1, math.ceil(len(labels) * _INCHES_PER_LINE / inches))
            axis.set_ticks(range(0, len(labels), stride), labels[::stride], fontsize="small", parse_math=False)
        axes.tick_params(length=2)
        axes.tick_params("x", labelrotation=90)
        axes.set_title(", ".join(f"{name} {i + 1}" for name, i in zip(names, index, strict=True)), fontsize="small")
    figure.supxlabel(axis_names[0])
    figure.supylabel(axis_names[1])
    set_title(figure, title)
    # As thick as a line of text is high, whatever the height of the figure; fixed numbers, since the layout reserves
    # their width.
    bar: dict[str, Any] = {
        "fraction": 0.03,
        "pad": 0.02,
        "aspect": max(20, 4 * figure.get_figheight()),
        "ticks": _TICKS,
    }
    figure.colorbar(image, ax=panels, label="attention weight", format="%.1f", **bar)
    return figure


def _label(token: str) -> str:
    return token if len(token) <= _LONGEST_LABEL else token[: _LONGEST_LABEL - 1] + "…"
