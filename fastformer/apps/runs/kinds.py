"""The kinds of run; an application is imported at the first use of its kind."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fastformer.settings import check_value

KINDS = ("translation", "language", "classification")  # folders of `apps`, each with `run.py` and `commands.py`
MAIN = KINDS[0]  # default of a config.toml without a kind, and of commands without --run


def application_of(kind: str) -> Any:
    """Return the `Application` whose runs are of a kind; raises ValueError if there is none."""
    check_value("kind", kind, str, choices=KINDS)
    return import_module(f"fastformer.apps.{kind}.run").APPLICATION


def applications() -> tuple[Any, ...]:
    """Return all applications."""
    return tuple(map(application_of, KINDS))


def application_for(model: Any, tokenizers: Sequence[Any]) -> Any:
    """Return the application of a model; raise TypeError, or ValueError for another number of tokenizers."""
    application = next((each for each in applications() if isinstance(model, each.network)), None)
    if application is None:
        names = ", ".join(each.network.__name__ for each in applications())
        raise TypeError(f"model must be one of {names}, not a {type(model).__name__}")
    count = len(application.tokenizers)
    if len(tokenizers) != count:
        raise ValueError(f"tokenizers must be {count} for a {type(model).__name__}, not {len(tokenizers)}")
    return application
