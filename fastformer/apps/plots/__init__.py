"""Figures of training runs, attention maps and positional encodings, drawn by matplotlib.

Every function returns a `matplotlib.figure.Figure` without pyplot and its global state, so the figures work in servers,
notebooks and threads. matplotlib is imported when the first figure is drawn. `save` writes PNG. Chinese, Japanese and
Korean need another `font.family` in the file matplotlibrc.
"""

from fastformer.apps.plots.attention_maps import plot_attention
from fastformer.apps.plots.figure import plot_history, plot_positions, save

__all__ = ["plot_attention", "plot_history", "plot_positions", "save"]
