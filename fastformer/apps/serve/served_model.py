"""What the API needs of a model; the `served.py` of each application implements it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.settings import Settings, refuse_idle


class ServedModel(ABC):
    """A model of one kind behind the API.

    Attributes:
        action: name of the endpoint, such as "translate".
        settings: settings that a request may give, and that are shown on the page.
        not_offered: names of settings of the process, which a request may not give.
    """

    action: ClassVar[str]
    settings: ClassVar[type[Settings]]
    not_offered: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def compute(self, texts: list[str], options: Any) -> list[Any]:
        """Return the JSON value for each text."""

    @abstractmethod
    def attention(self, text: str) -> AttentionMaps:
        """Return the attention weights of a text; of a translation, those of the decoder to the source."""

    def limited(self, options: Any, most_tokens: int) -> Any:
        """Return the options of a request within the limits of the server; raise ValueError beyond them."""
        return options

    def options(self, values: dict[str, Any], most_tokens: int) -> Any:
        """Return the settings of a request.

        Raises:
            ValueError: a setting is unknown, out of range, without effect, or beyond a limit of the server.
        """
        for name in self.not_offered & values.keys():
            raise ValueError(f"{name} cannot be set by a request")
        options = self.settings(**values)
        refuse_idle({"": values}, {"": options})
        return self.limited(options, most_tokens)


def once_each(texts: list[str], compute: Callable[[list[str]], list[Any]]) -> list[Any]:
    """Return the results of texts, computed once for equal ones, whose random numbers would differ otherwise."""
    different = list(dict.fromkeys(texts))
    results = dict(zip(different, compute(different), strict=True))
    return [results[text] for text in texts]


def served_model(run: Path, checkpoint: str, device: str) -> ServedModel:
    """Load a run of any kind."""
    model: ServedModel = import_module(f"fastformer.apps.{read_kind(run)}.served").Served(run, checkpoint, device)
    return model
