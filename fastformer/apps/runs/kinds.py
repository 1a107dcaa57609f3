"""The kinds of run; an application is imported at the first use of its kind."""

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
