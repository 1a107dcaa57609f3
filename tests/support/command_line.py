"""A command of the command line within this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra `apps`")

from fastformer.apps.cli import main
from fastformer.apps.cli.console import console


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def fastformer(*arguments: str, cwd: Path, stdin: bytes = b"", encoding: str = "utf-8") -> Done:
    """Run a command in this process, which saves two seconds of imports each; its streams hold that encoding only."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, errors) for errors in ("strict", "backslashreplace"))
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
    written = [stream.detach().getvalue().decode(encoding) for stream in (out, err) if not stream.flush()]
    return Done(code, *written)
