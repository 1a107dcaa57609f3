"""Positional encodings: their values, and how alike positions are."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastformer.apps.plots.figure import grid, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_positions(encoding: Tensor, title: str = "") -> "Figure":
    """A positional encoding, its values and the cosine similarity of its positions. encoding [T, D]."""
    if encoding.dim() != 2 or 0 in encoding.shape:
        raise ValueError(f"encoding has shape {list(encoding.shape)}; it must be [T, D], both at least 1")
    from matplotlib.ticker import MaxNLocator

    values = encoding.detach().float().cpu()
    figure = new_figure(11.0, 4.4)
    left, right = grid(figure, 1, 2, 2)
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
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    set_title(figure, title)
    return figure
