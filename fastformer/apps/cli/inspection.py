"""`fastformer plot attention | positions | history` and `fastformer compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.commands import application_function
from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.options import INSPECT, App, whole_number
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.plots.figure import figure_format
from fastformer.apps.runs.comparison import RunSummary, differing_settings, summarise
from fastformer.apps.runs.folder import read_kind, refuse_output
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
    d_model: Annotated[int, whole_number("width of the model")] = 128,
    length: Annotated[int, whole_number("positions to draw")] = 100,
    output: Output = Path("positions.png"),
) -> None:
    """Draw the sinusoidal positional encoding, and the similarity of positions."""
    from fastformer.apps.plots import plot_positions, save

    figure_format(output)
    check_value("d_model", d_model, int, at_least=1, at_most=16384)
    check_value("length", length, int, at_least=1, at_most=2048)
    figure = plot_positions(sinusoidal_positions(length, d_model), f"sinusoidal positions, d_model {d_model}")
    console.print(f"wrote {save(figure, output)}")


@plot.command(rich_help_panel=INSPECT)
def history(runs: Runs, output: Output = Path("history.png")) -> None:
    """Draw the learning curves of one or several runs."""
    from fastformer.apps.plots import plot_history, save

    _check_figure(output, *runs)
    curves = {str(run): records for run in runs if (records := summarise(run).records)}
    if not curves:
        raise ValueError(f"{', '.join(map(str, runs))}: no metrics yet, so there is nothing to draw")
    console.print(f"wrote {save(plot_history(curves), output)}")


@app.command(rich_help_panel=INSPECT)
def compare(
    runs: Runs,
    bootstrap: Annotated[
        int | None,
        whole_number(
            "of translation runs: translate the first run's test data with all, and compare with the first run "
            "by so many resamples of the sentences, such as 1000"
        ),
    ] = None,
) -> None:
    """Compare runs: steps, time, best validation values, and the settings that differ."""
    from rich.table import Table

    check_value("bootstrap", bootstrap, int | None, at_least=2)
    if bootstrap is not None and (len(runs) < 2 or {read_kind(run) for run in runs} != {"translation"}):
        raise ValueError("--bootstrap compares at least two translation runs")
    summaries = [summarise(run) for run in runs]
    differing = differing_settings(summaries)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.name, justify="right", overflow="fold")
    for name, values in (_values(summaries) | differing).items():
        table.add_row(name, *map(_formatted, values))
    console.print(table)
    if any(name.startswith("text.") for name in differing):
        console.print("The runs differ in text or tokens: their losses and perplexities do not compare.")
    if bootstrap is not None:
        compare_systems = application_function(runs[0], "compare_systems", {})
        for score in compare_systems(runs, bootstrap):
            p_value = "" if score.p_value is None else f"  p = {score.p_value:.4f}"
            console.print(f"{score.metric:6} {score.score:6.2f}{p_value}  {score.system}")


def _values(runs: list[RunSummary]) -> dict[str, list[Any]]:
    """Return steps, time and best validation values, {name: one for each run}."""
    clocks = " or ".join(dict.fromkeys(str(run.settings.get("train.clock", "wall")) for run in runs))
    values = {
        "steps": [run.last.get("step") for run in runs],
        f"seconds ({clocks})": [run.last.get("seconds") for run in runs],
        "best validation at step": [run.best.get("step") for run in runs],
    }
    names = dict.fromkeys(name for run in runs for name in run.best if name not in ("kind", "step", "epoch", "seconds"))
    return values | {f"  {name}": [run.best.get(name) for run in runs] for name in names}


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
