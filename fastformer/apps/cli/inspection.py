"""`fastformer plot attention | positions | history` and `fastformer compare`."""

import math
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.commands import application_function
from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.options import INSPECT, App, whole_number
from fastformer.apps.models.embeddings import sinusoidal_positions
from fastformer.apps.plots.figure import check_png
from fastformer.apps.runs.folder import DATA, config_of, read_kind, read_toml, refuse_output
from fastformer.apps.text.files import read_json
from fastformer.apps.train import read_metrics
from fastformer.apps.train.metrics import JSONL, LOWER_IS_BETTER
from fastformer.settings import check_value

_TRANSLATION = "Of translation runs"

Output = Annotated[Path, typer.Option(help="file to write: .png")]
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

    refuse_output(output, runs=(run,))
    check_png(output)
    layers = None if layer is None else _number_or("layer", layer, ("all",))
    heads = _number_or("head", head, ("all", "mean"))
    options = {"text": text, "source": source, "target": target, "kind": kind}
    maps, about = application_function(run, "attention_of", options)(run, checkpoint, choose_device(device))
    console.print(f"{about}wrote {save(maps.figure(layers, heads), output)}")


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

    check_png(output)
    check_value("d_model", d_model, int, at_least=1, at_most=16384)
    check_value("length", length, int, at_least=1, at_most=2048)
    figure = plot_positions(sinusoidal_positions(length, d_model), f"sinusoidal positions, d_model {d_model}")
    console.print(f"wrote {save(figure, output)}")


@plot.command(rich_help_panel=INSPECT)
def history(runs: Runs, output: Output = Path("history.png")) -> None:
    """Draw the learning curves of one or several runs."""
    from fastformer.apps.plots import plot_history, save

    refuse_output(output, runs=tuple(runs))
    check_png(output)
    curves = {str(run): records for run in runs if (records := _records(run))}
    if not curves:
        raise ValueError(f"{', '.join(map(str, runs))}: no metrics yet, so there is nothing to draw")
    console.print(f"wrote {save(plot_history(curves), output)}")


@app.command(rich_help_panel=INSPECT)
def compare(
    runs: Runs,
    bootstrap: Annotated[
        int | None,
        whole_number(
            "translate the first translation run's test data with every run, and compare each with the first by "
            "paired bootstrap, with this many resamples of the sentences, such as 1000"
        ),
    ] = None,
) -> None:
    """Compare runs: steps, time, best validation values, and the settings that differ."""
    from rich.table import Table

    check_value("bootstrap", bootstrap, int | None, at_least=2)
    if bootstrap is not None and (len(runs) < 2 or {read_kind(run) for run in runs} != {"translation"}):
        raise ValueError("--bootstrap compares at least two translation runs")
    settings = [_settings(run) for run in runs]
    results = [_results(_records(run), each) for run, each in zip(runs, settings, strict=True)]
    differing = {name: values for name, values in _rows(settings).items() if any(x != values[0] for x in values)}
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(str(run), justify="right", overflow="fold")
    for name, values in (_rows(results) | differing).items():
        table.add_row(name, *map(_formatted, values))
    console.print(table)
    if any(name.startswith("text.") for name in differing):
        console.print("The runs differ in text or tokens: their losses and perplexities do not compare.")
    if bootstrap is not None:
        for score in application_function(runs[0], "compare_systems", {})(runs, bootstrap):
            p_value = "" if score.p_value is None else f"  p = {score.p_value:.4f}"
            console.print(f"{score.metric:6} {score.score:6.2f}{p_value}  {score.system}")


def _records(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, none if it only began; raises FileNotFoundError if the folder holds no run."""
    return read_metrics(run) if (config_of(run).parent / JSONL).is_file() else []


def _settings(run: Path) -> dict[str, Any]:
    """Return all of config.toml as "section.key", and the checksums of the encoded text."""
    sections = {name: values for name, values in read_toml(config_of(run)).items() if isinstance(values, dict)}
    settings = {f"{section}.{name}": value for section in sections for name, value in sections[section].items()}
    report = read_json(path) if (path := config_of(run).parent / DATA).is_file() else {}
    return settings | {
        f"text.{name}": str(report[name])[:8] for name in ("fingerprint", "validation") if name in report
    }


def _results(records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Return steps, time and the values of the best validation by the run's metric; if none has it, of the last."""
    metric, clock = str(settings.get("train.metric", "loss")), settings.get("train.clock", "wall")
    validations = [each for each in records if each["kind"] in ("validation", "average")]
    rated = [each for each in validations if not math.isnan(each.get(metric, math.nan))]
    best = (min if metric in LOWER_IS_BETTER else max)(rated, key=lambda each: each[metric]) if rated else {}
    best, last = best or (validations or [{}])[-1], (records or [{}])[-1]
    values = {"steps": last.get("step"), f"seconds ({clock})": last.get("seconds")}
    values |= {"best validation at step": best.get("step")}
    return values | {f"  {name}": best[name] for name in best if name not in ("kind", "step", "epoch", "seconds")}


def _rows(columns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return {name: one value for each column, None where it has none}."""
    return {name: [each.get(name) for each in columns] for name in dict.fromkeys(chain.from_iterable(columns))}


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
