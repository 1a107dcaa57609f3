"""The command line: `fastformer demo | data | train | translate | evaluate | info`.

A user's mistake ends in one line on standard error and exit code 2; anything else is a bug and shows its traceback.
"""

import os

# Before torch is imported: spinning OpenMP threads turn a busy machine's seconds into minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.logging import RichHandler
except ModuleNotFoundError as error:  # the core installs no command-line library
    sys.exit(f"error: the command line needs {error.name}: pip install 'fastformer[apps]'")

from fastformer.backend import BackendError
from fastformer.cli_options import with_settings
from fastformer.describe import describe_model, describe_run, describe_system
from fastformer.generate import SearchOptions, Translator
from fastformer.models import TranslationConfig
from fastformer.text import DATASETS, TextError, prepare, read_lines, read_parallel, write_lines
from fastformer.train import TrainConfig, load_toml
from fastformer.translation import (
    DERIVED,
    SECTIONS,
    DataConfig,
    TranslationRun,
    evaluate,
    load_translator,
    read_config,
    read_corpora,
)

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


def _device(name: str) -> str:
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


@app.command()
def demo(
    target: Annotated[str, typer.Option(help="fr or de")] = "fr",
    run: Annotated[Path, typer.Option(help="folder for the run; an earlier demo in it is replaced")] = Path("demo"),
    device: Device = "auto",
) -> None:
    """Train on generated number words, translate held-out numbers and draw an attention map. About a minute."""
    from fastformer.demo import run_demo

    run_demo(run, target, _device(device), console)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help=" | ".join(DATASETS))],
    source: Annotated[Path, typer.Option("--from", help="folder that holds the dataset's files")],
    to: Annotated[Path | None, typer.Option(help="folder to make; default: data/NAME")] = None,
) -> None:
    """Check a dataset's files and prepare them. Nothing is fetched."""
    console.print(str(prepare(name, source, to or Path("data") / name)))


@app.command()
@with_settings(data=DataConfig, model=TranslationConfig, train=TrainConfig)
def train(
    run: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/translation"),
    config: Annotated[
        Path | None, typer.Option(help="TOML file with sections data, model, train; flags override it")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="continue the run in --run; only settings of train may be given")
    ] = False,
    fallback: Annotated[
        bool, typer.Option(help="with --resume: if the last checkpoint is damaged, take the one before")
    ] = False,
    device: Device = "auto",
    *,
    data: dict[str, Any],
    model: dict[str, Any],
    train: dict[str, Any],
) -> None:
    """Train a translation model. Ctrl-C validates, saves and ends; --resume carries on exactly there."""
    if resume:
        if data or model or config:
            raise ValueError("--resume takes its data and model from the run folder; give [train] settings only")
        current = TranslationRun.open(run, train, _device(device))
    else:
        file: dict[str, dict[str, Any]] = load_toml(config, SECTIONS) if config else {name: {} for name in SECTIONS}
        wrong = [name for name in DERIVED if name in file["model"]]
        if wrong:
            raise ValueError(f"{config}: [model] {wrong[0]} is set from the tokenizer; leave it out")
        current = TranslationRun.create(
            run,
            DataConfig(**file["data"] | data),
            file["model"] | model,
            TrainConfig(**file["train"] | train),
            _device(device),
        )
    for line in (*current.data_report()["corpora"].values(), f"training: {current.pairs}"):
        console.print(line)
    console.print(f"model: {describe_model(current.model_config)}")
    cpu = time.process_time()
    result = current.fit(resume, fallback)
    cpu = time.process_time() - cpu
    console.print(
        f"ended after {result.step:,} steps, {result.seconds:,.0f} s ({cpu:,.0f} CPU-seconds in this session): "
        f"{result.reason}; run folder: {run}"
    )
    _plot_history(run)


def _plot_history(run: Path) -> None:
    from fastformer.plots import plot_history, save
    from fastformer.train import read_metrics

    save(plot_history({run.name: read_metrics(run)}), run / "history.png")


@app.command()
@with_settings(search=SearchOptions)
def translate(
    sentences: Annotated[list[str] | None, typer.Argument(help="sentences; none: read them from --input")] = None,
    run: Run = Path("runs/translation"),
    input: Annotated[Path | None, typer.Option(help="file of sentences, one a line; default: standard input")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the translations; default: standard output")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="print the score before each translation")] = False,
    batch_size: Annotated[int, typer.Option(help="sentences translated at a time")] = 64,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    search: dict[str, Any],
) -> None:
    """Translate sentences, a file, or standard input."""
    translator = load_translator(run, checkpoint, _device(device))
    if not sentences:
        if input is None and sys.stdin.isatty():
            console.print("Type a sentence and press Enter; Ctrl-D ends.", style="dim")
            for line in sys.stdin:
                _write_translations(translator, [line.strip()], search, scores, batch_size, None)
            return
        sentences = read_lines(input) if input is not None else _standard_input()
    _write_translations(translator, sentences, search, scores, batch_size, output)


def _standard_input() -> list[str]:
    try:
        return sys.stdin.buffer.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TextError(f"standard input: not valid UTF-8 at byte {error.start}") from None


def _write_translations(
    translator: Translator,
    sentences: list[str],
    search: dict[str, Any],
    scores: bool,
    batch_size: int,
    output: Path | None,
) -> None:
    found = translator.candidates(sentences, SearchOptions(**search), batch_size)
    lines = [f"{c.score:.4f}\t{c.text}" if scores else c.text for candidates in found for c in candidates]
    if output is None:
        for line in lines:
            print(line, flush=True)
    else:
        write_lines(output, lines)


@app.command(name="evaluate")
@with_settings(search=SearchOptions)
def evaluate_command(
    run: Run = Path("runs/translation"),
    split: Annotated[str, typer.Option(help="part of the run's data: test or valid")] = "test",
    source: Annotated[Path | None, typer.Option(help="file of source sentences, instead of --split")] = None,
    target: Annotated[Path | None, typer.Option(help="file of their reference translations")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the translations")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="compare lower-cased")] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    search: dict[str, Any],
) -> None:
    """Translate a test set by real search and print sacreBLEU and chrF with their signatures."""
    if (source is None) != (target is None):
        raise ValueError("--source and --target must be given together")
    if source is not None and target is not None:
        corpus = read_parallel(source, target)
    elif split in ("test", "valid"):
        corpus = read_corpora(DataConfig(**read_config(run)["data"]))[split]  # type: ignore[index]
    else:
        raise ValueError(f"split must be test or valid, not {split!r}")
    options = SearchOptions(**search)
    scores, translations = evaluate(load_translator(run, checkpoint, _device(device)), corpus, options, lowercase)
    if output is not None:
        write_lines(output, translations)
    console.print(f"{corpus}; beam {options.beam}, length penalty {options.length_penalty}")
    console.print(str(scores))


@app.command()
def info(run: Annotated[Path | None, typer.Option(help="describe this run folder too")] = None) -> None:
    """Show versions, devices, which backend would run and why; with --run, the run's model and checkpoints."""
    console.print(describe_system())
    if run is not None:
        console.print(describe_run(run))


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


if __name__ == "__main__":
    main()
