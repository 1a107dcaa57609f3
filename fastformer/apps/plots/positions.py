"""Figures of positional encodings: values, and similarity of positions."""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import normalize

from fastformer.apps.plots.figure import grid, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    left, right = grid(figure, 1, 2, 2)
    for axes, image, label, options in (
        (left, values, "value", {"aspect": "auto", "cmap": "RdBu_r", "vmin": -limit, "vmax": limit}),
        (right, similarity, "cosine similarity", {"cmap": "viridis"}),
    ):
        drawn = axes.imshow(image.numpy(), interpolation="nearest", **options)
        figure.colorbar(drawn, ax=axes, label=label)
        axes.locator_params(integer=True)
    left.set(xlabel="dimension", ylabel="position", title="value of each dimension")
    right.set(xlabel="position", ylabel="position", title="similarity of positions")
    set_title(figure, title)
    return figure
