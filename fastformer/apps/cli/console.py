"""Shared by all commands: the typer application, the console, devices, and input and output of lines."""

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from fastformer.apps.cli.options import App
from fastformer.apps.runs.folder import MAIN, refuse_output
from fastformer.apps.system.files import check_writable, is_stream
from fastformer.apps.text.files import checked_lines, lines_of, write_lines
from fastformer.settings import check_value

app = App(
    help="Transformers without work on padding: train, translate, evaluate. Start with: fastformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)

RunFolder = Annotated[Path, typer.Option("--run", help="run folder")]
MAIN_RUN = Path("runs") / MAIN
Input = Annotated[Path | None, typer.Option(help="file or pipe of texts, one a line; default: standard input")]
Output = Annotated[Path | None, typer.Option(help="file for the results; default: standard output")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:N, mps or xpu; auto takes a CUDA GPU where there is one")
]
Checkpoint = Annotated[str, typer.Option(help="best, last, average or step-N; several, with commas, are averaged")]


def input_batches(
    texts: list[str] | None, input: Path | None, output: Path | None, what: str, batch_size: int, ahead: int = 1
) -> Iterator[list[str]]:
    """Return the input texts of a command in lists, which the command answers one by one; errors are raised first.

    From a pipe, a list has one batch of lines, so that answers come before the pipe ends. From a file, it has `ahead`
    batches, so that lines of similar length can be batched. Typed lines are lists of one line.

    texts: the arguments, returned as one list. input: None: standard input is read. output: the file to write. what: a
    name for the texts in messages. ahead: batches in a list, if the input is a file.
    """
    check_value("batch_size", batch_size, int, at_least=1)
    if texts and input is not None:
        raise ValueError(f"give {what} or --input, not both")
    if texts:
        return iter([texts])
    if input is not None:
        return batched(checked_lines(input), batch_size if input.is_fifo() else ahead * batch_size)
    if sys.stdin is None:  # translate <&-
        raise ValueError(f"standard input is closed: give {what}, or --input")
    if sys.stdin.isatty():
        console.print("Type a line and press Enter; Ctrl-D ends.", style="dim")
        batch_size = 1
    refuse_output(output, Path("/dev/stdin"))
    lines = lines_of(sys.stdin.buffer, "standard input")
    if sys.stdin.buffer.seekable():  # a file, of which all lines are checked first
        return batched(list(lines), ahead * batch_size)
    return batched(lines, batch_size)


def batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of `size` lines; the last may have fewer."""
    lines = iter(lines)
    while batch := list(itertools.islice(lines, size)):
        yield batch


def check_output(output: Path | None, *inputs: Path | None, run: Path) -> None:
    """Raise ValueError or OSError for an output that cannot be written, or would replace an input or a run's file.

    None is standard output.
    """
    refuse_output(output, *inputs, runs=(run,))
    if output is None:
        if sys.__stdout__ is None:  # translate >&-
            raise ValueError("standard output is closed: give --output")
    elif output.is_dir():
        raise IsADirectoryError(f"{output} is a folder")
    elif not is_stream(output):
        folder = Path(os.path.realpath(output)).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        for path in (folder, output):
            check_writable(path)


def put_lines(lines: Iterable[str], output: Path | None) -> None:
    """Write lines as `put_texts` does; ends of lines within one, which byte tokens may decode to, become spaces."""
    put_texts((re.sub(r"[\r\n]+", " ", line) for line in lines), output)


def put_texts(texts: Iterable[str], output: Path | None) -> None:
    """Write texts one by one to standard output, or to a file that replaces `output` at the end; see `write_lines`."""
    if output is not None:
        write_lines(output, texts)
    else:
        for text in texts:
            print(text, flush=True)


def choose_device(name: str) -> str:
    """Return the device that `name` means; raise ValueError if torch does not have it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ValueError(f"device must be auto, cpu, cuda, cuda:N, mps or xpu, not {name!r}")
    if device.type == "cpu":
        return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator and accelerator.type == device.type else 0
    if (device.index or 0) >= count:
        raise ValueError(f"device {name!r} was asked for, but torch sees {count or 'no'} {device.type.upper()} devices")
    return name
