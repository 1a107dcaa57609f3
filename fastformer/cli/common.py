"""What all commands share: the application they register with, the console, and options that several of them have."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fastformer.runs import Run as AnyRun

app = typer.Typer(
    help="Transformers without work on padding: train, translate, evaluate. Start with: fastformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False, soft_wrap=True, markup=False)  # [brackets] in paths and hints are text

train_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.add_typer(train_app, name="train")

Resume = Annotated[bool, typer.Option(help="continue the run in --run; only settings of train may be given")]
Fallback = Annotated[bool, typer.Option(help="with --resume: if the last checkpoint is damaged, take the one before")]
Config = Annotated[Path | None, typer.Option(help="TOML file with sections data, model, train; flags override it")]
Run = Annotated[Path, typer.Option(help="run folder, made by `fastformer train` or `fastformer demo`")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one")]
Checkpoint = Annotated[str, typer.Option(help="best, last or average")]


def report_training(run: "AnyRun", resume: bool, fallback: bool, model: str) -> None:
    """Train a run: say what is read, what learns and how it ended, and draw the learning curve.

    Args:
        run: ready to be trained.
        resume: continue from the last checkpoint.
        fallback: where that one is damaged, take the one before.
        model: what learns, in words.
    """
    from fastformer.plots import plot_history, save
    from fastformer.train import read_metrics

    report = run.data_report()
    for line in (*report["corpora"].values(), f"training: {report['training']}", f"model: {model}"):
        console.print(line)
    cpu = time.process_time()
    result = run.fit(resume, fallback)
    cpu = time.process_time() - cpu
    console.print(
        f"ended after {result.step:,} steps, {result.seconds:,.0f} s ({cpu:,.0f} CPU-seconds in this session): "
        f"{result.reason}; run folder: {run.folder}"
    )
    save(plot_history({run.folder.name: read_metrics(run.folder)}), run.folder / "history.png")


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
