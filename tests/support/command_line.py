"""A command of the command line within this process, and run folders for it, without training."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.cli import main
from fastformer.apps.cli.console import console
from fastformer.apps.runs.application import application_for
from fastformer.apps.train import CheckpointFolder, TrainConfig


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def fastformer(*arguments: str, cwd: Path, stdin: bytes = b"") -> Done:
    """Run a command in this process, which saves two seconds of imports each.

    The encoding of its standard output is ASCII, as of a locale without UTF-8, and it must write UTF-8.
    """
    out, err = io.TextIOWrapper(io.BytesIO(), "ascii"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "160")
        patch.setattr(sys, "argv", ["fastformer", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(console, "quiet", False)  # rich turns it on for good where a pipe has no reader
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    written = [stream.detach().getvalue().decode("utf-8") for stream in (out, err) if not stream.flush()]
    return Done(code, *written)


def succeed(*arguments: str, cwd: Path, stdin: bytes = b"") -> str:
    """Run a command that must succeed, and return its output."""
    done = fastformer(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def save_run(folder: Path, model: Any, *tokenizers: Any, **data: Any) -> None:
    """Write a run of one checkpoint; `data`: settings of the data."""
    CheckpointFolder(folder / "checkpoints").save(1, model.state_dict(), {}, model.config)
    application = application_for(model, tokenizers)
    application.save_tokenizers(folder, tokenizers)
    application.save_settings(folder, data, model.config, TrainConfig(steps=1))
