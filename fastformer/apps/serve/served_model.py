"""What the API needs of a model; the `served.py` of each application implements it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.settings import Settings, refuse_idle
from fastformer.settings import check_value


class ServedModel(ABC):
    """A model of one kind behind the API.

    Attributes:
        action: name of the endpoint, such as "translate".
        settings: settings that a request may give, and that are shown on the page.
        length: name of the setting that limits the tokens of a result; None: there is no such setting.
        most: the largest values of other settings.
        not_offered: names of settings of the process, which a request may not give.
    """

    action: ClassVar[str]
    settings: ClassVar[type[Settings]]
    length: ClassVar[str | None] = None
    most: ClassVar[Mapping[str, int]] = {}
    not_offered: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def compute(self, texts: list[str], options: Any) -> list[Any]:
        """Return the JSON value for each text."""

    @abstractmethod
    def attention(self, text: str) -> AttentionMaps:
        """Return the attention weights of a text; of a translation, those of the decoder to the source."""

    def options(self, values: dict[str, Any], most_tokens: int) -> Any:
        """Return the settings of a request.

        Raises:
            ValueError: a setting is unknown, out of range, without effect, or beyond a limit of the server.
        """
        for name in self.not_offered & values.keys():
            raise ValueError(f"{name} cannot be set by a request")
        limits = {**self.most, **({self.length: most_tokens} if self.length else {})}
        options = self.settings(**values)
        refuse_idle({"": values}, {"": options})
        for name in limits.keys() & values.keys():
            check_value(name, values[name], int | None, at_most=limits[name])
        if self.length and values.get(self.length) is None:
            default = getattr(self.settings, self.length) or most_tokens
            options = replace(options, **{self.length: min(default, most_tokens)})
        return options


def once_each(texts: list[str], compute: Callable[[list[str]], list[Any]]) -> list[Any]:
    """Return the results of texts, computed once for equal ones, whose random numbers would differ otherwise."""
    different = list(dict.fromkeys(texts))
    results = dict(zip(different, compute(different), strict=True))
    return [results[text] for text in texts]


def served_model(run: Path, checkpoint: str, device: str) -> ServedModel:
    """Load a run of any kind."""
    model: ServedModel = import_module(f"fastformer.apps.{read_kind(run)}.served").Served(run, checkpoint, device)
    return model
