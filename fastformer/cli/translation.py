"""`fastformer train | translate | evaluate`."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.cli.common import Checkpoint, Device, Run, app, choose_device, console
from fastformer.cli.settings import with_settings
from fastformer.describe import describe_model
from fastformer.generate import SearchOptions, Translator
from fastformer.models import TranslationConfig
from fastformer.text import TextError, read_lines, read_parallel, write_lines
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
        current = TranslationRun.open(run, train, choose_device(device))
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
            choose_device(device),
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
    translator = load_translator(run, checkpoint, choose_device(device))
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
    scores, translations = evaluate(load_translator(run, checkpoint, choose_device(device)), corpus, options, lowercase)
    if output is not None:
        write_lines(output, translations)
    console.print(f"{corpus}; beam {options.beam}, length penalty {options.length_penalty}")
    console.print(str(scores))
