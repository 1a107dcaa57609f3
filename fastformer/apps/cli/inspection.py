"""`fastformer plot attention | positions | history` and `fastformer compare`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from fastformer.apps.cli.common import Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.language.attention_maps import attend_text
from fastformer.apps.language.model import LanguageModel
from fastformer.apps.language.run import load_generator, load_language_model
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.runs.comparison import Comparison, RunSummary, compare_runs
from fastformer.apps.runs.folder import KINDS, read_kind
from fastformer.apps.runs.own_files import refuse_output
from fastformer.apps.translation.attention_maps import attend
from fastformer.apps.translation.model import TranslationModel
from fastformer.apps.translation.run import load_translator
from fastformer.settings import check_value

Output = Annotated[Path, typer.Option(help="PNG file to write")]
Runs = Annotated[list[Path], typer.Argument(help="run folders")]

plot = typer.Typer(help="Draw attention maps, positional encodings and learning curves as PNG.", no_args_is_help=True)
app.add_typer(plot, name="plot")


@plot.command()
def attention(
    source: Annotated[str | None, typer.Option(help="translation: the sentence to translate")] = None,
    target: Annotated[
        str | None, typer.Option(help="translation: a translation of it; default: the model's own")
    ] = None,
    text: Annotated[str | None, typer.Option(help="language model: the text to read")] = None,
    run: RunFolder = Path("runs/translation"),
    kind: Annotated[str | None, typer.Option(help="translation: cross, encoder or decoder; default: cross")] = None,
    layer: Annotated[str | None, typer.Option(help="1, 2, … or all; default: the last")] = None,
    head: Annotated[str, typer.Option(help="1, 2, …, all or mean")] = "all",
    output: Output = Path("attention.png"),
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Draw where a model looks: one head, the heads of a layer, or all layers.

    A translation model, when it translates --source into --target; a language model, when it reads --text.
    """
    from fastformer.apps.plots import save

    refuse_output(output, runs=(run,))
    which: Any = None if layer is None else _number_or("layer", layer, ("all",))
    heads: Any = _number_or("head", head, ("all", "mean"))
    if read_kind(run) == "translation":
        _check_options(run, {"source": source}, {"text": text})
        assert source is not None
        sentences = attend(load_translator(run, checkpoint, choose_device(device)), source, target)
        figure = sentences.figure(kind or "cross", which, heads)  # type: ignore[arg-type]
        console.print(f"{sentences.source} -> {sentences.target}")
    else:
        _check_options(run, {"text": text}, {"source": source, "target": target, "kind": kind})
        assert text is not None
        figure = attend_text(load_generator(run, checkpoint, choose_device(device)), text).figure(which, heads)
    console.print(f"wrote {save(figure, output)}")


def _check_options(run: Path, needed: Mapping[str, str | None], others: Mapping[str, str | None]) -> None:
    """Of the options that are for one kind of run, those that are needed must be given, and the others must not."""
    kind = KINDS[read_kind(run)][0]
    for name, value in needed.items():
        if value is None:
            raise ValueError(f"{run} is a {kind} run; give --{name}")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{run} is a {kind} run; --{name} is not for it")


def _number_or(name: str, text: str, words: tuple[str, ...]) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or {' or '.join(words)}, not {text!r}") from None


@plot.command()
def positions(
    run: Annotated[
        Path | None, typer.Option(help="run folder, made by `fastformer train` or `fastformer train lm`; default: none")
    ] = None,
    side: Annotated[str | None, typer.Option(help="translation: source or target; default: source")] = None,
    d_model: Annotated[int | None, typer.Option(help="without a run: width of the model; default: 128")] = None,
    length: Annotated[
        int | None, typer.Option(help="positions to draw; default: all that a run learned, or 100")
    ] = None,
    output: Output = Path("positions.png"),
    checkpoint: Annotated[str | None, typer.Option(help="of a run: best (the default), last or average")] = None,
) -> None:
    """Draw a positional encoding, sinusoidal or as a run learned it, and how alike its positions are."""
    from fastformer.apps.plots import plot_positions, save

    for name, value in (("d_model", d_model), ("length", length)):
        check_value(name, value, int | None, at_least=1, at_most=16384)
    if run is None:
        if side is not None:
            raise ValueError("--side is for the run of a translation model; give --run too")
        if checkpoint is not None:
            raise ValueError("--checkpoint is of a run; give --run too")
        width = d_model or 128
        encoding, title = sinusoidal_positions(length or 100, width), f"sinusoidal positions, d_model {width}"
    else:
        refuse_output(output, runs=(run,))
        if d_model is not None:
            raise ValueError("--d-model is for positions without a run; leave it out, or leave out --run")
        encoding, title = _positions_of(run, side, length, checkpoint or "best")
    console.print(f"wrote {save(plot_positions(encoding, title), output)}")


def _positions_of(run: Path, side: str | None, length: int | None, checkpoint: str) -> tuple[Tensor, str]:
    """The position encodings of a run `[length, D]`, and a title."""
    if read_kind(run) == "translation":
        side = side or "source"
        check_value("side", side, str, choices=("source", "target"))
        model: TranslationModel | LanguageModel = load_translator(run, checkpoint).model
        embedding, where = getattr(model, f"{side}_embedding"), f"{run}, {side}"
    else:
        _check_options(run, {}, {"side": side})
        model = load_language_model(run, checkpoint)[0]
        embedding, where = model.embedding, str(run)
    length = length or model.config.longest or 100
    title = f"{model.config.positions} positions of {where}, d_model {model.config.d_model}"
    return embedding.encodings(length)[:length], title


@plot.command()
def history(runs: Runs, output: Output = Path("history.png")) -> None:
    """Draw the learning curves of one or several runs."""
    refuse_output(output, runs=tuple(runs))
    console.print(f"wrote {_draw_histories(compare_runs(runs), output)}")


def _draw_histories(comparison: Comparison, output: Path) -> Path:
    from fastformer.apps.plots import plot_history, save

    silent = [str(run.folder) for run in comparison.runs if not run.records]
    if len(silent) == len(comparison.runs):
        raise ValueError(f"{', '.join(silent)}: no metrics yet, so there is nothing to draw")
    return save(plot_history({run.name: run.records for run in comparison.runs if run.records}), output)


@app.command()
def compare(
    runs: Runs,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the learning curves of all runs")] = None,
) -> None:
    """Compare runs: sizes, budgets, best validation values, and the settings that differ."""
    from rich.table import Table

    refuse_output(plot, runs=tuple(runs))
    comparison = compare_runs(runs)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in comparison.runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for name, cells in _rows(comparison):
        table.add_row(name, *cells)
    console.print(table)
    if any(name in ("loss", "perplexity") for name in comparison.values) and not comparison.same_tokens:
        console.print("The runs differ in text or vocabulary: their losses and perplexities per token do not compare.")
    silent = [str(run.folder) for run in comparison.runs if not run.records]
    if silent:
        console.print(f"No metrics yet: {', '.join(silent)}")
    if plot is not None:
        console.print(f"wrote {_draw_histories(comparison, plot)}")


def _rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    def row(name: str, of: Any) -> tuple[str, list[str]]:
        return name, [of(run) for run in comparison.runs]

    rows = [
        row("parameters", lambda run: _shown(run.parameters)),
        row("steps", lambda run: _shown(run.steps)),
        row("time", _time),
        row("best validation at step", lambda run: _shown(run.best_step)),
        *(row(f"  {name}", lambda run, name=name: _shown(run.best.get(name))) for name in comparison.values),
    ]
    return rows + [(key, [_shown(value) for value in values]) for key, values in comparison.differing.items()]


def _time(run: RunSummary) -> str:
    return "–" if run.seconds is None else f"{run.seconds:,.0f} {'CPU-s' if run.clock == 'cpu' else 's'}"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
