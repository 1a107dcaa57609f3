"""Find the application's function behind a command for runs of every kind, and bind the options that it takes."""

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of


def application_function(run: Path, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function from the `commands.py` of a run's application, with its options bound.

    Args:
        run: the run folder.
        name: the name of the function.
        options: options of all applications by name, settings as a dictionary; None, False and {} mean not given.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: an option is missing, or is not for runs of this kind.
    """
    application = application_of(read_kind(run))
    function = getattr(import_module(f"fastformer.apps.{application.kind}.commands"), name)
    about = f"{run} is a {application.title} run"
    parameters = inspect.signature(function).parameters
    for option, value in options.items():
        if option in parameters and value is None and parameters[option].default is inspect.Parameter.empty:
            raise ValueError(f"{about}; give {flag(option)}")
        if option not in parameters and value not in (None, False, {}):
            raise ValueError(f"{about}; {flag(next(iter(value)) if isinstance(value, dict) else option)} is not for it")
    return functools.partial(function, **{name: value for name, value in options.items() if name in parameters})


def flag(name: str) -> str:
    """Return the command-line option of a parameter."""
    return f"--{name.replace('_', '-')}"
