"""What all commands share: the application they register with, the console, and options that several of them have."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Transformers without work on padding: train, translate, evaluate. Start with: fastformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False, soft_wrap=True, markup=False)  # [brackets] in paths and hints are text

Run = Annotated[Path, typer.Option(help="run folder, made by `fastformer train` or `fastformer demo`")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one")]
Checkpoint = Annotated[str, typer.Option(help="best, last or average")]


def choose_device(name: str) -> str:
    """Resolve auto, and check that torch has the device."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no CUDA device")
    return name
