"""`fastformer data | info`, and `fastformer --version`."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer

import fastformer
from fastformer.apps.cli.console import app, console
from fastformer.apps.cli.help import SHARE, TRAIN
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of
from fastformer.apps.text import DATASETS, prepare
from fastformer.apps.train import CheckpointFolder
from fastformer.backend import Backend
from fastformer.functional import explain
from fastformer.functional.choice import INSTALL_TRITON

_ABSENT = "not installed"


def _show_version(requested: bool) -> None:
    if requested:
        console.print(f"fastformer {fastformer.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Take the options of no command."""


@app.command(rich_help_panel=TRAIN)
def data(
    name: Annotated[str, typer.Argument(help=" | ".join(DATASETS))],
    source: Annotated[Path, typer.Option("--from", help="folder that holds the dataset's files")],
    to: Annotated[Path | None, typer.Option(help="folder to make; default: data/NAME")] = None,
) -> None:
    """Check a dataset's files and prepare them. Nothing is fetched."""
    console.print(str(prepare(name, source, to or Path("data") / name)))


@app.command(rich_help_panel=SHARE)
def info(run: Annotated[Path | None, typer.Option(help="describe this run folder too")] = None) -> None:
    """Show versions, devices, which backend would run and why; with --run, the run's model and checkpoints."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = fastformer.get_backend()
    others = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "sentencepiece"))
    lines = [
        f"fastformer {fastformer.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {others}",
        _triton(),
        f"CPU threads: {torch.get_num_threads()}",
        *_gpus(),
        f"backend: {choice} (environment variable FASTFORMER_BACKEND=auto|triton|reference)",
    ]
    if choice != "auto":
        lines += [f"with it, a float32 tensor on {device} takes", *_ops(choice, device)]
    lines += [f"with backend auto, a float32 tensor on {device} takes", *_ops("auto", device)]
    console.print("\n".join(lines))
    if run is not None:
        application = application_of(read_kind(run))
        described = application.describe(application.model(**application.read_config(run)["model"]))
        checkpoints = CheckpointFolder(run / "checkpoints")
        best, last = (path.name if path else "none" for path in (checkpoints.best(), checkpoints.last()))
        console.print(f"{run}: {application.title} run, {described}")
        console.print(f"  checkpoints: best {best} (value {checkpoints.best_value()}), last {last}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _triton() -> str:
    versions = [v for v in map(_version, ("triton", "triton-windows")) if v != _ABSENT]
    if not versions:
        return f"Triton: not installed ({INSTALL_TRITON})"
    interpreter = os.environ.get("TRITON_INTERPRET")
    return f"Triton: {versions[0]}" + (f", TRITON_INTERPRET={interpreter}" if interpreter else "")


def _gpus() -> list[str]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        f"GPU {i}: {x.name}, compute capability {x.major}.{x.minor}, {x.multi_processor_count} multiprocessors, "
        f"{x.total_memory / 2**30:.0f} GiB"
        for i, x in enumerate(properties)
    ] or ["GPU: none"]


def _ops(choice: Backend, device: str) -> list[str]:
    """Return a line for each verdict of `explain`, with the ops that share it."""
    ops_of: dict[str, list[str]] = {}
    with fastformer.backend(choice):
        for line in explain(torch.empty(0, device=device)).splitlines():
            op, verdict = line.split(": ", 1)
            ops_of.setdefault(verdict.replace(f"({op} ", "("), []).append(op)
    return [f"  {', '.join(ops)}: {verdict}" for verdict, ops in ops_of.items()]
