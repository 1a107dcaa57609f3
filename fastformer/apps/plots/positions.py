"""Positional encodings: their values, and how alike positions are."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastformer.apps.plots.figure import grid, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 2048  # rows of a picture, which has fewer points; matplotlib takes some 50 bytes for each number of it


def plot_positions(encoding: Tensor, title: str = "") -> "Figure":
    """A positional encoding, its values and the cosine similarity of its positions; of many, every n-th is drawn.

    encoding: [T, D].
    """
    if encoding.dim() != 2 or 0 in encoding.shape:
        raise ValueError(f"encoding has shape {list(encoding.shape)}; it must be [T, D], both at least 1")
    from matplotlib.ticker import MaxNLocator

    T, D = encoding.shape
    values = encoding.detach()[:: -(-T // _MOST)].float().cpu()  # [at most _MOST, D]
    figure = new_figure(11.0, 4.4)
    left, right = grid(figure, 1, 2, 2)
    limit = float(values.abs().max()) or 1.0
    across, all_positions = (
        (-0.5, D - 0.5),
        (T - 0.5, -0.5),
    )  # as matplotlib has it: numbers in the middle of their cells
    extent = (*across, *all_positions)
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = left.imshow(values.numpy(), aspect="auto", interpolation="nearest", extent=extent, **colours)
    left.set_xlabel("dimension")
    left.set_ylabel("position")
    left.set_title("value of each dimension")
    figure.colorbar(image, ax=left, label="value")
    normal = torch.nn.functional.normalize(values, dim=1)
    similarity = normal @ normal.T  # [at most _MOST, at most _MOST]
    extent = (*all_positions[::-1], *all_positions)
    image = right.imshow(similarity.numpy(), cmap="viridis", interpolation="nearest", extent=extent)
    right.set_xlabel("position")
    right.set_ylabel("position")
    right.set_title("similarity of positions")
    figure.colorbar(image, ax=right, label="cosine similarity")
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    set_title(figure, title)
    return figure
