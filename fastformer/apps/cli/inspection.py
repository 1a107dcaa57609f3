"""`fastformer plot attention | positions | history` and `fastformer compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.commands import application_function
from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.options import INSPECT, App, whole_number
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.plots.figure import figure_format
from fastformer.apps.runs.comparison import Comparison, RunSummary, compare_runs
from fastformer.apps.runs.folder import read_kind, refuse_output
from fastformer.apps.runs.kinds import application_of
from fastformer.settings import check_value

_TRANSLATION = "Of translation runs"

Output = Annotated[Path, typer.Option(help="file to write: .png, .pdf or .svg")]
Runs = Annotated[list[Path], typer.Argument(help="run folders")]

plot = App(help="Draw attention maps, positional encodings and learning curves.", no_args_is_help=True)
app.add_typer(plot, name="plot", rich_help_panel=INSPECT)


@plot.command(rich_help_panel=INSPECT)
def attention(
    run: RunFolder = MAIN_RUN,
    layer: Annotated[str | None, typer.Option(help="1, 2, … or all; default: the last")] = None,
    head: Annotated[str, typer.Option(help="1, 2, …, all or mean")] = "all",
    output: Output = Path("attention.png"),
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    text: Annotated[
        str | None, typer.Option(help="the text to read", rich_help_panel="Of language-model and classification runs")
    ] = None,
    source: Annotated[str | None, typer.Option(help="the sentence to translate", rich_help_panel=_TRANSLATION)] = None,
    target: Annotated[
        str | None, typer.Option(help="a translation of it; default: the model's own", rich_help_panel=_TRANSLATION)
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="cross, encoder or decoder; default: cross", rich_help_panel=_TRANSLATION)
    ] = None,
) -> None:
    """Draw the attention weights of a model for a text: one head, the heads of a layer, or all layers."""
    from fastformer.apps.plots import save

    _check_figure(output, run)
    layers = None if layer is None else _number_or("layer", layer, ("all",))
    heads = _number_or("head", head, ("all", "mean"))
    options = {"text": text, "source": source, "target": target, "kind": kind}
    attention_of = application_function(run, "attention_of", options)
    draw, about = attention_of(run=run, checkpoint=checkpoint, device=choose_device(device))
    console.print(f"{about}wrote {save(draw(layers, heads), output)}")


def _check_figure(output: Path, *runs: Path) -> None:
    """Raise ValueError for an output that is a file of the runs, or of an unknown format."""
    refuse_output(output, runs=runs)
    figure_format(output)


def _number_or(name: str, text: str, words: tuple[str, ...]) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or {' or '.join(words)}, not {text!r}") from None


@plot.command(rich_help_panel=INSPECT)
def positions(
    run: Annotated[Path | None, typer.Option(help="run folder, of any kind; default: none")] = None,
    d_model: Annotated[int | None, whole_number("without a run: width of the model; default: 128")] = None,
    length: Annotated[int | None, whole_number("positions to draw; default: all that a run learned, or 100")] = None,
    output: Output = Path("positions.png"),
    side: Annotated[
        str | None,
        typer.Option(help="positions of this side: source (the default) or target", rich_help_panel=_TRANSLATION),
    ] = None,
) -> None:
    """Draw a positional encoding, sinusoidal or as a run learned it, and the similarity of positions."""
    from fastformer.apps.plots import plot_positions, save

    _check_figure(output, *([] if run is None else [run]))
    check_value("d_model", d_model, int | None, at_least=1, at_most=16384)
    check_value("length", length, int | None, at_least=1, at_most=16384)
    check_value("side", side, str | None, choices=("source", "target"))
    if run is None:
        if side is not None:
            raise ValueError("--side needs --run")
        width = d_model or 128
        encoding, title = sinusoidal_positions(length or 100, width), f"sinusoidal positions, d_model {width}"
    else:
        if d_model is not None:
            raise ValueError("--d-model is for positions without a run; leave it out, or leave out --run")
        application = application_of(read_kind(run))
        model = application.load_weights(run, "best")
        embeddings = {
            name: getattr(model, f"{prefix}embedding")
            for name, prefix in (("source", "source_"), ("target", "target_"), (None, ""))
            if hasattr(model, f"{prefix}embedding")
        }
        if side is not None and side not in embeddings:
            raise ValueError(f"{run} is a {application.title} run; --side is not for it")
        name = side or next(iter(embeddings))
        length = length or model.config.longest or 100
        encoding = embeddings[name].encodings(length)[:length]
        where = f"{run}, {name}" if name else run
        title = f"{model.config.positions} positions of {where}, d_model {model.config.d_model}"
    console.print(f"wrote {save(plot_positions(encoding, title), output)}")


@plot.command(rich_help_panel=INSPECT)
def history(runs: Runs, output: Output = Path("history.png")) -> None:
    """Draw the learning curves of one or several runs."""
    _check_figure(output, *runs)
    console.print(f"wrote {_draw_histories(compare_runs(runs), output)}")


def _draw_histories(comparison: Comparison, output: Path) -> Path:
    from fastformer.apps.plots import plot_history, save

    without_metrics = [str(run.folder) for run in comparison.runs if not run.records]
    if len(without_metrics) == len(comparison.runs):
        raise ValueError(f"{', '.join(without_metrics)}: no metrics yet, so there is nothing to draw")
    return save(plot_history({run.name: run.records for run in comparison.runs if run.records}), output)


@app.command(rich_help_panel=INSPECT)
def compare(
    runs: Runs,
    plot: Annotated[
        Path | None, typer.Option(help="file for the learning curves of all runs: .png, .pdf or .svg")
    ] = None,
    bootstrap: Annotated[
        int | None,
        whole_number(
            "of translation runs: translate the first run's test data with all, and compare with the first run "
            "by so many resamples of the sentences, such as 1000"
        ),
    ] = None,
) -> None:
    """Compare runs: sizes, budgets, best validation values, and the settings that differ."""
    from rich.table import Table

    if plot is not None:
        _check_figure(plot, *runs)
    check_value("bootstrap", bootstrap, int | None, at_least=2)
    if bootstrap is not None and (len(runs) < 2 or {read_kind(run) for run in runs} != {"translation"}):
        raise ValueError("--bootstrap compares at least two translation runs")
    comparison = compare_runs(runs)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in comparison.runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for row in _rows(comparison):
        table.add_row(*row)
    console.print(table)
    if any(name in ("loss", "perplexity") for name in comparison.values) and not comparison.same_tokens:
        console.print("The runs differ in text or vocabulary: their losses and perplexities per token do not compare.")
    if not comparison.same_bleu:
        console.print("The runs have different BLEU signatures: their BLEU does not compare.")
    without_metrics = [str(run.folder) for run in comparison.runs if not run.records]
    if without_metrics:
        console.print(f"No metrics yet: {', '.join(without_metrics)}")
    if plot is not None:
        console.print(f"wrote {_draw_histories(comparison, plot)}")
    if bootstrap is not None:
        compare_systems = application_function(runs[0], "compare_systems", {})
        for score in compare_systems(runs, bootstrap):
            p_value = "" if score.p_value is None else f"  p = {score.p_value:.4f}"
            console.print(f"{score.metric:6} {score.score:6.2f}{p_value}  {score.system}")


def _rows(comparison: Comparison) -> list[list[str]]:
    def row(name: str, cell: Any) -> list[str]:
        return [name, *(cell(run) for run in comparison.runs)]

    scores = [row(f"  {name}", lambda run, name=name: _formatted(run.best.get(name))) for name in comparison.values]
    if any(run.bleu_signature for run in comparison.runs):
        scores.append(row("  bleu signature", lambda run: _formatted(run.bleu_signature)))
    rows = [
        row("parameters", lambda run: _formatted(run.parameters)),
        row("steps", lambda run: _formatted(run.steps)),
        row("time", _time),
        row("best validation at step", lambda run: _formatted(run.best_step)),
        *scores,
    ]
    return rows + [[key, *map(_formatted, values)] for key, values in comparison.differing.items()]


def _time(run: RunSummary) -> str:
    return "–" if run.seconds is None else f"{run.seconds:,.0f} {'CPU-s' if run.clock == 'cpu' else 's'}"


def _formatted(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
