"""What all commands share: the application they register with, the console, and options that several of them have."""

import collections
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console

from fastformer.apps.cli.help import App
from fastformer.apps.runs.folder import refuse_output
from fastformer.apps.runs.kinds import MAIN
from fastformer.apps.system.files import check_writable, is_stream
from fastformer.apps.system.terminal import Terminal
from fastformer.apps.text import checked_lines, lines_of, write_texts
from fastformer.settings import check_value

_ENDS = re.compile(r"[\r\n]+")  # of lines, for us and for whoever else reads them

logger = logging.getLogger("fastformer")


app = App(
    help="Transformers without work on padding: train, translate, evaluate. Start with: fastformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False}
console = Console(**_PLAIN)


def demo_console() -> Console:
    """Return a console whose failed writes end the output, not the run."""
    return Console(file=cast("IO[str]", Terminal(sys.stdout)), **_PLAIN)


_DEVICES = ("cpu", "cuda", "mps", "xpu")
RunFolder = Annotated[Path, typer.Option("--run", help="run folder, of any kind")]
MAIN_RUN = Path("runs") / MAIN
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:N, mps or xpu; auto takes a CUDA GPU where there is one")
]
Checkpoint = Annotated[str, typer.Option(help="best, last or average")]


def given_lines(
    texts: list[str] | None, input: Path | None, output: Path | None, what: str, batch_size: int, ahead: int = 1
) -> Iterator[list[str]]:
    """What a command is to read: its arguments, a file or standard input, in lists that are answered one by one.

    A list has a batch of lines, so that a program at the other end of a pipe gets its answers; of a file it has `ahead`
    batches, in which lines of similar length may go together. What is typed comes line by line.

    Args:
        texts: the arguments, one list.
        input: the file.
        output: where what is made of them goes; None: standard output, as typed lines want it.
        what: the texts are, for messages.
        batch_size: lines of a batch.
        ahead: batches of a file in a list.

    Raises:
        ValueError: there are arguments and a file, or neither and standard input is closed; or lines are to be typed
            and something is to be written to a file; or standard input is the file to write, or standard output is
            wanted and closed; or a line of a file is no text, or batch_size is below 1. At once; what is wrong with a
            line from a pipe, when it is read.
        OSError: see `check_output`.
    """
    check_output(output)
    check_value("batch_size", batch_size, int, at_least=1)
    if texts and input is not None:
        raise ValueError(f"give {what} or --input, not both")
    if not texts and input is None and sys.stdin is None:  # translate <&-
        raise ValueError(f"standard input is closed: give {what}, or --input")
    typed = not texts and input is None and sys.stdin.isatty()
    if typed and output is not None:
        raise ValueError(f"--output is for {what} that are given, or in a file: give them, or --input")
    if texts:
        return iter([texts])
    if input is not None:
        return batched(checked_lines(input), batch_size if input.is_fifo() else ahead * batch_size)
    refuse_output(output, Path("/dev/stdin"))
    if typed:
        return _typed_lines()
    source, name = cast("BufferedReader", sys.stdin.buffer), "standard input"
    if not source.seekable():
        return batched(lines_of(source, name), batch_size)
    begin = source.tell()
    collections.deque(lines_of(source, name), maxlen=0)  # an error in a line comes before the work
    source.seek(begin)
    return batched(lines_of(source, name), ahead * batch_size)


def batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of `size` lines; the last may have fewer."""
    lines = iter(lines)
    while batch := list(itertools.islice(lines, size)):
        yield batch


def check_output(output: Path | None) -> None:
    """Refuse a place where a command's texts could not go once they are made: all would be lost.

    Args:
        output: where to write; None: standard output.

    Raises:
        ValueError: standard output is closed.
        IsADirectoryError, FileNotFoundError, PermissionError: it is a folder, in none, or may not be written.
    """
    if output is None:
        if sys.__stdout__ is None:  # translate >&-; sys.stdout is to nothing then
            raise ValueError("standard output is closed: give --output")
        return
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder")
    if is_stream(output):
        return
    folder = Path(os.path.realpath(output)).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{output} cannot be written")
    check_writable(output)


def _typed_lines() -> Iterator[list[str]]:
    console.print("Type a line and press Enter; Ctrl-D ends.", style="dim")
    for line in sys.stdin:
        yield [line.strip()]


def put_lines(lines: Iterable[str], output: Path | None) -> None:
    """Write lines as they come to standard output, or to a file that replaces `output` at the end; see `write_texts`.

    An end of a line within one, which a vocabulary of bytes may decode to, becomes a space, with a warning: the nth
    line stays the nth, and nothing that was computed is lost.
    """
    changed = 0

    def whole() -> Iterator[str]:
        nonlocal changed
        for line in lines:
            joined = _ENDS.sub(" ", line)
            changed += joined != line
            yield joined

    if output is not None:
        write_texts(output, whole())
    else:
        for line in whole():
            print(line, flush=True)
    if changed:
        logger.warning("%d lines had ends of lines within; they have spaces there", changed)


def choose_device(name: str) -> str:
    """Resolve auto, and check that torch has the device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in _DEVICES:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N, mps or xpu, not {name!r}")
    if device.type == "cpu":
        return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    if (device.index or 0) >= count:
        raise ValueError(f"device {name!r} was asked for, but torch sees {count or 'no'} {device.type.upper()} devices")
    return name
