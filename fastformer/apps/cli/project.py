"""`fastformer data | info`, and `fastformer --version`."""

from pathlib import Path
from typing import Annotated

import typer

import fastformer
from fastformer.apps.cli.console import app, console
from fastformer.apps.cli.describe import describe_run, describe_system
from fastformer.apps.cli.help import SHARE, TRAIN
from fastformer.apps.text import DATASETS, prepare


def _show_version(wanted: bool) -> None:
    if wanted:
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
    console.print(describe_system())
    if run is not None:
        console.print(describe_run(run))
