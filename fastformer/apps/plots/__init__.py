"""Figures of training runs, attention maps and positional encodings.

Every function returns a `matplotlib.figure.Figure` that belongs to nobody else: pyplot, its global state and its
choice of a window system are never touched, so the figures work in a server, a notebook and a thread alike. matplotlib
is imported when the first figure is drawn. `save` writes PNG, PDF or SVG.

Colours: the Okabe-Ito palette, which people with colour-blindness can tell apart, and viridis for values.
"""

from fastformer.apps.plots.attention_figures import plot_attention, plot_attention_heads, plot_attention_layers
from fastformer.apps.plots.figure import save
from fastformer.apps.plots.history import plot_history
from fastformer.apps.plots.positions import plot_positions

__all__ = [
    "plot_attention",
    "plot_attention_heads",
    "plot_attention_layers",
    "plot_history",
    "plot_positions",
    "save",
]
