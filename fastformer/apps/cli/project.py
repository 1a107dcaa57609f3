"""`fastformer demo | data | info`."""

from pathlib import Path
from typing import Annotated

import typer

from fastformer.apps.cli.common import Device, app, choose_device, console
from fastformer.apps.cli.describe import describe_run, describe_system
from fastformer.apps.text import DATASETS, prepare


@app.command()
def demo(
    target: Annotated[str, typer.Option(help="fr or de")] = "fr",
    run: Annotated[Path, typer.Option(help="folder for the run; an earlier demo in it is replaced")] = Path("demo"),
    device: Device = "auto",
) -> None:
    """Train on generated number words, translate held-out numbers and draw an attention map. About a minute."""
    from fastformer.apps.translation.demo import run_demo

    run_demo(run, target, choose_device(device), console)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help=" | ".join(DATASETS))],
    source: Annotated[Path, typer.Option("--from", help="folder that holds the dataset's files")],
    to: Annotated[Path | None, typer.Option(help="folder to make; default: data/NAME")] = None,
) -> None:
    """Check a dataset's files and prepare them. Nothing is fetched."""
    console.print(str(prepare(name, source, to or Path("data") / name)))


@app.command()
def info(run: Annotated[Path | None, typer.Option(help="describe this run folder too")] = None) -> None:
    """Show versions, devices, which backend would run and why; with --run, the run's model and checkpoints."""
    console.print(describe_system())
    if run is not None:
        console.print(describe_run(run))
