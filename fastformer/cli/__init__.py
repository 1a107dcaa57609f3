"""The command line: `fastformer demo | data | train | translate | generate | evaluate | plot | compare |
export | info`.

A user's mistake ends in one line on standard error and exit code 2; anything else is a bug and shows its traceback.
Commands register with `common.app` in the order in which their modules are imported here.
"""

import os

# Before torch is imported: spinning OpenMP threads turn a busy machine's seconds into minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import logging
import sys

try:
    from rich.console import Console
    from rich.logging import RichHandler

    from fastformer.cli.common import app
except ModuleNotFoundError as error:  # the core installs no command-line library
    if error.name not in ("rich", "typer"):
        raise
    sys.exit(f"error: the command line needs {error.name}: pip install 'fastformer[apps]'")

from fastformer.backend import BackendError
from fastformer.cli import evaluation, export, generation, inspection, language, project, translation

__all__ = ["evaluation", "export", "generation", "inspection", "language", "main", "project", "translation"]


def main() -> None:
    """Run the command line."""
    # The package's warnings, such as a vocabulary that was clamped, belong on standard error.
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_time=False, show_path=False)],
    )
    try:
        app()
    except (ValueError, OSError, FloatingPointError, ImportError, BackendError) as error:
        # TextError, CheckpointError and DivergedError are among these.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
