"""`fastformer plot attention | positions | history` and `fastformer compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.cli.common import Checkpoint, Device, Run, app, choose_device, console
from fastformer.comparison import Comparison, RunSummary, compare_runs

Output = Annotated[Path, typer.Option(help="PNG file to write")]
Runs = Annotated[list[Path], typer.Argument(help="run folders")]

plot = typer.Typer(help="Draw attention maps, positional encodings and learning curves as PNG.", no_args_is_help=True)
app.add_typer(plot, name="plot")


@plot.command()
def attention(
    source: Annotated[str, typer.Option(help="sentence to translate")],
    target: Annotated[str | None, typer.Option(help="a translation of it; default: the model's own")] = None,
    run: Run = Path("runs/translation"),
    kind: Annotated[str, typer.Option(help="cross, encoder or decoder")] = "cross",
    layer: Annotated[str | None, typer.Option(help="1, 2, … or all; default: the last")] = None,
    head: Annotated[str, typer.Option(help="1, 2, …, all or mean")] = "all",
    output: Output = Path("attention.png"),
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Draw where a translation model looks: one head, the heads of a layer, or all layers."""
    from fastformer.generate.sentence_attention import attend
    from fastformer.plots import save
    from fastformer.translation import load_translator

    chosen: Any = None if layer is None else _number_or("layer", layer, ("all",))
    heads: Any = _number_or("head", head, ("all", "mean"))
    maps = attend(load_translator(run, checkpoint, choose_device(device)), source, target)
    path = save(maps.figure(kind, chosen, heads), output)  # type: ignore[arg-type]
    console.print(f"{maps.source} -> {maps.target}\nwrote {path}")


def _number_or(name: str, text: str, words: tuple[str, ...]) -> int | str:
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or {' or '.join(words)}, not {text!r}") from None


@plot.command()
def positions(
    d_model: Annotated[int, typer.Option(help="width of the model")] = 128,
    length: Annotated[int, typer.Option(help="positions to draw")] = 100,
    output: Output = Path("positions.png"),
) -> None:
    """Draw the sinusoidal positional encoding, and how alike its positions are."""
    from fastformer.models import sinusoidal_positions
    from fastformer.plots import plot_positions, save

    for name, value, most in (("d_model", d_model, 16384), ("length", length, 16384)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} must be between 1 and {most:,}, not {value}")
    title = f"sinusoidal positions, d_model {d_model}"
    console.print(f"wrote {save(plot_positions(sinusoidal_positions(length, d_model), title), output)}")


@plot.command()
def history(runs: Runs, output: Output = Path("history.png")) -> None:
    """Draw the learning curves of one or several runs."""
    console.print(f"wrote {_draw_histories(compare_runs(runs), output)}")


def _draw_histories(comparison: Comparison, output: Path) -> Path:
    from fastformer.plots import plot_history, save

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
