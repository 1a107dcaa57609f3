"""The command line: `fastformer data | info | train | evaluate | plot | compare | export`, and what applications add.

A user's mistake ends in one line on standard error and exit code 2; anything else is a bug and shows its traceback.
Commands register with `common.app` when their modules are imported; those of an application stand in its folder.
"""

import os

from fastformer.apps.system.terminal import sizes
from fastformer.apps.system.waiting import waiting

os.environ.update(waiting(os.environ))  # before torch is imported
os.environ.update(sizes(os.environ))  # before rich is

import logging
import sys
from typing import NoReturn, TextIO, cast

import torch

try:
    from rich.console import Console
    from rich.logging import RichHandler

    from fastformer.apps.cli.console import app
except ModuleNotFoundError as error:  # the core installs no command-line library
    if error.name not in ("pydantic", "rich", "typer"):
        raise
    sys.exit(f"error: the command line needs {error.name}: pip install 'fastformer[apps]'")

from fastformer.apps.cli import evaluation, export, inspection, project
from fastformer.apps.cli.parts import register_shared
from fastformer.apps.runs.kinds import load_commands
from fastformer.apps.system.terminal import Terminal, escaped, give_up_on
from fastformer.apps.text.files import encode_text
from fastformer.apps.train.processes import ProcessError, describe_process, leaving
from fastformer.backend import BackendError

__all__ = ["evaluation", "export", "inspection", "main", "project"]

# Characters of a warning or an error, which may quote a stranger's file; a word of n, rich breaks into lines in the
# square of n, 100,000 in a minute.
_LONGEST = 2000

load_commands()
register_shared()


def main() -> None:
    """Run the command line."""
    with leaving():
        _main()


def _main() -> None:
    try:
        _open_streams()
        _show_warnings()
        for argument in sys.argv[1:]:  # Python reads bytes that are no UTF-8 as halves of surrogate pairs
            encode_text(argument, f"argument {argument!r}")
        app()
    except UnicodeEncodeError as error:  # a ValueError
        _fail(_unshown(error))
    except (ValueError, OSError, FloatingPointError, ImportError, BackendError) as error:
        # TextError, CheckpointError and DivergedError are among these.
        _fail(_one_line(error))
    except OverflowError as error:  # a size that torch cannot count to
        _fail(f"a number is too large ({_one_line(error)})")
    except ProcessError as error:
        _fail(None if error.reported else _one_line(error))
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is a GPU's; a CPU's allocator raises a plain RuntimeError.
        known = MemoryError, torch.OutOfMemoryError
        if not isinstance(error, known) and "allocate memory" not in str(error):
            raise
        _fail(f"out of memory ({_one_line(error)[:200]})")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for stream in (sys.stdout, sys.stderr):
            give_up_on(stream)


def _show_warnings() -> None:
    """The package's warnings, such as a vocabulary that was clamped, belong on standard error."""
    console = Console(file=cast("TextIO", Terminal(sys.stderr)))
    handler = RichHandler(console=console, show_time=False, show_path=False)
    handler.setFormatter(_Escaping())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _Escaping(logging.Formatter):
    """Messages without the control characters of what they quote, and the begin of long ones."""

    def format(self, record: logging.LogRecord) -> str:
        said = escaped(super().format(record))
        return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def _open_streams() -> None:
    """Give standard input, output and error, where they are closed, to nothing: no file must get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # what Python makes of one that was closed; click flushes it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _fail(message: str | None) -> NoReturn:
    if message is not None:
        Terminal(sys.stderr).line(f"error: {describe_process()}{message}")
    sys.exit(2)


def _unshown(error: UnicodeEncodeError) -> str:
    """What to say of a character that standard output cannot hold, or another place."""
    encoding, character = getattr(sys.stdout, "encoding", None) or "utf-8", error.object[error.start]
    if error.encoding == "utf-8" or character.encode(encoding, "ignore"):  # cp1252 would say "charmap"
        return _one_line(error)
    return f"standard output is in {encoding}, which has no {character!a}: set PYTHONIOENCODING=utf-8, or give --output"


def _one_line(error: Exception) -> str:
    """The message of an error, the begin of a long one; names of files and what was typed may hold ends of lines."""
    said = str(error)
    return escaped(" ".join((said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…").splitlines()))
