"""Which kinds of run there are: a folder of `apps` with a `commands.py` is an application, and its name their kind.

Nothing else knows a kind by name. Looking for them imports nothing; an application is imported when a run of its kind
is met, or the command line assembles its commands. Beside `commands.py` it has `run.py` with its record, `APPLICATION`.
"""

import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fastformer.settings import check_value

if TYPE_CHECKING:
    from fastformer.apps.runs.application import Application

_ROOMS = Path(__file__).resolve().parents[1]


@functools.cache
def kinds() -> tuple[str, ...]:
    """The kinds of run, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in _ROOMS.glob("*/commands.py")))


def application_of(kind: str) -> "Application":
    """The application whose runs are of a kind; raises ValueError where there is none."""
    check_value("kind", kind, str, choices=kinds())
    application: Application = import_module(f"fastformer.apps.{kind}.run").APPLICATION
    return application


def applications() -> "tuple[Application, ...]":
    """All of them."""
    return tuple(application_of(kind) for kind in kinds())


def main_application() -> "Application":
    """The one that is meant where nothing is said: by a config.toml without a kind, and by commands without --run."""
    (main,) = (each for each in applications() if each.main)
    return main


def load_commands() -> None:
    """Import the commands of all applications, the main one first; they register with the command line."""
    for kind in sorted(kinds(), key=lambda kind: (application_of(kind).main, kind), reverse=True):
        import_module(f"fastformer.apps.{kind}.commands")
