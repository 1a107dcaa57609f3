"""The command line: commands for runs of all kinds; each application has further ones in `commands.py`.

A user's mistake ends in one line on standard error and exit status 2; anything else is a bug and shows its traceback.
"""

import os

from fastformer.apps.system.openmp import wait_variables

os.environ.update(wait_variables(os.environ))  # before torch is imported

import io
import logging
import sys
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

import torch

try:
    from fastformer.apps.cli.console import app
except ModuleNotFoundError as error:  # the core installs no command-line library
    if error.name not in ("pydantic", "rich", "typer"):
        raise
    sys.exit(f"error: the command line needs {error.name}: pip install 'fastformer[apps]'")

from fastformer.apps.runs.folder import KINDS
from fastformer.apps.text.files import encode_text
from fastformer.apps.train.processes import ProcessError, describe_process, exit_without_shutdown
from fastformer.backend import BackendError

__all__ = ["app", "main"]

_LONGEST = 2000  # characters of an error

# As --help lists them.
for _module in (*(f"{kind}.commands" for kind in KINDS), "cli.commands", "cli.inspection"):
    import_module(f"fastformer.apps.{_module}")


@exit_without_shutdown()
def main() -> None:
    """Run the command line."""
    try:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # in every locale, as files and standard input
        for argument in sys.argv[1:]:  # Python reads bytes that are not UTF-8 as halves of surrogate pairs
            encode_text(argument, f"argument {argument!r}")
        app()
    except (ValueError, OSError, FloatingPointError, ImportError, BackendError) as error:
        # TextError, CheckpointError and DivergedError are among these.
        _fail(str(error))
    except OverflowError as error:  # a size that torch cannot count to
        _fail(f"a number is too large ({error})")
    except ProcessError as error:
        if error.reported:
            sys.exit(2)
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is a GPU's; a CPU's allocator raises a plain RuntimeError.
        known = MemoryError, torch.OutOfMemoryError
        if not isinstance(error, known) and "allocate memory" not in str(error):
            raise
        _fail(f"out of memory ({str(error)[:200]})")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    """Print the error in one line, and exit; it may quote a file, so a long one is truncated."""
    shown = " ".join((message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…").splitlines())
    with suppress(OSError):
        print(f"error: {describe_process()}{shown}", file=sys.stderr)
    sys.exit(2)
