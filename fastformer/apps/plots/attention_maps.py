"""Where a model looks: every attention weight for a text, with what to call its rows and columns.

Letters: L layers, H heads, T query positions (of a translation: of the target), S key positions (of the source).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor, nn

from fastformer.apps.plots.attention_figures import plot_attention, plot_attention_heads, plot_attention_layers
from fastformer.host.devices import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Reader(Protocol):
    """A model that reads one sequence: of our applications, language models and classifiers."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its parameters."""
        ...

    def attention_maps(self, ids: Tensor) -> Tensor:
        """Return the weights `[L, H, T, T]` of a sequence of T ids."""
        ...


@dataclass(frozen=True)
class AttentionMaps:
    """Every weight of one kind of attention.

    Attributes:
        title: what attends to what: the begin of a figure's title, and its end.
        weights: `[L, H, T, S]`, on the CPU; row t is how query t spreads over the keys.
        keys: the S tokens that are looked at.
        queries: the T tokens that look.
        axis_names: of the keys and of the queries.
    """

    title: tuple[str, str]
    weights: Tensor
    keys: list[str]
    queries: list[str]
    axis_names: tuple[str, str]

    def figure(self, layer: int | Literal["all"] | None = None, head: int | Literal["all", "mean"] = "all") -> "Figure":
        """Draw the maps of one head, of the heads of a layer, or of all layers.

        Args:
            layer: from 1, None for the last one; or "all".
            head: from 1; or "all", a panel for each; or "mean", their average.

        Raises:
            ValueError: there is no such layer or head.
        """
        weights = self.weights
        layers, heads = weights.shape[:2]
        layer = layers if layer is None else layer
        _check_choice("layer", layer, layers, ("all",))
        _check_choice("head", head, heads, ("all", "mean"))
        which = "all layers" if layer == "all" else f"layer {layer}"
        if head == "mean":
            weights, which = weights.mean(1), f"{which}, mean of {heads} heads"
        elif head != "all":
            weights, which = weights[:, head - 1], f"{which}, head {head}"
        draw = plot_attention_layers
        if layer != "all":
            weights = weights[layer - 1]
            draw = plot_attention_heads if head == "all" else plot_attention
        what, text = self.title
        return draw(weights, self.keys, self.queries, f"{what}, {which}: {text}", self.axis_names)


def attend_ids(
    model: Reader,
    ids: Sequence[int],
    tokens: Sequence[str],
    text: str = "",
) -> AttentionMaps:
    """Compute every attention weight of a model that reads one sequence.

    Args:
        model: call `.eval()` first, or dropout takes some weights away.
        ids: of the sequence.
        tokens: what to call them.
        text: for the title; empty: the tokens.

    Raises:
        ValueError: there is no token, not a name for each, or more than learned positions hold.
    """
    if not len(ids) or len(ids) != len(tokens):
        raise ValueError(f"ids and tokens must be equally many and at least one, not {len(ids)} and {len(tokens)}")
    weights = model.attention_maps(torch.tensor(ids, device=device_of(model))).cpu()
    title = "attention", text or " ".join(tokens)
    return AttentionMaps(title, weights, list(tokens), list(tokens), ("token looked at", "token"))


def _check_choice(name: str, value: int | str, count: int, words: tuple[str, ...]) -> None:
    if value in words or (isinstance(value, int) and 1 <= value <= count):
        return
    raise ValueError(f"{name} must be 1 to {count} or {' or '.join(words)}, not {value!r}")
