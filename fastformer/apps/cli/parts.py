"""Commands for runs of every kind: the application's function that does the work, and the options that it takes."""

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of


def part_of(run: Path, name: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of the `commands.py` of a run's application, with the options that it takes.

    Args:
        run: the folder.
        name: of the function.
        given: options of all applications by name, settings as a dictionary; None, False and {} are not given.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: an option is missing, or is not for such runs.
    """
    application = application_of(read_kind(run))
    part = getattr(import_module(f"fastformer.apps.{application.kind}.commands"), name)
    about = f"{run} is a {application.title} run"
    parameters = inspect.signature(part).parameters
    for option, value in given.items():
        if option in parameters and value is None and parameters[option].default is inspect.Parameter.empty:
            raise ValueError(f"{about}; give {flag(option)}")
        if option not in parameters and value not in (None, False, {}):
            raise ValueError(f"{about}; {flag(next(iter(value)) if isinstance(value, dict) else option)} is not for it")
    return functools.partial(part, **{name: value for name, value in given.items() if name in parameters})


def flag(name: str) -> str:
    """Return the option of a parameter."""
    return f"--{name.replace('_', '-')}"
