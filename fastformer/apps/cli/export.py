"""`fastformer export`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, RunFolder, app, console
from fastformer.apps.cli.flags import int_or_text
from fastformer.apps.cli.help import SHARE
from fastformer.apps.export import export_ctranslate2, export_safetensors
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of
from fastformer.settings import check_value

_POSITIONS = 2048
FORMATS = ("ctranslate2", "safetensors")


@app.command(rich_help_panel=SHARE)
def export(
    to: Annotated[Path, typer.Option(help="folder to make")],
    run: RunFolder = MAIN_RUN,
    format: Annotated[str, typer.Option(help="ctranslate2 or safetensors")] = "ctranslate2",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="of CTranslate2's weights: float32 (the default), float16, bfloat16, int16, int8, int8_float16, …"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="of safetensors: float32 (the default), float16 or bfloat16")
    ] = None,
    positions: Annotated[
        int | None,
        typer.Option(
            help=f"longest sequence in CTranslate2, where positions are sinusoidal; default: {_POSITIONS}",
            parser=int_or_text,
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a run's model and tokenizers for another program."""
    if Path(os.path.realpath(to)).is_relative_to(os.path.realpath(run)):  # unlike resolve, takes a loop of links
        raise ValueError(f"--to {to} is in the run folder {run}; choose a folder outside")
    check_value("format", format, str, choices=FORMATS)
    idle = {"quantization": quantization, "positions": positions} if format == "safetensors" else {"dtype": dtype}
    for name, value in idle.items():
        if value is not None:
            raise ValueError(f"--{name} is not for format {format}; leave it out")
    application = application_of(read_kind(run))
    model, tokenizers = application.load_weights(run, checkpoint), application.load_tokenizers(run)
    if positions is not None and model.config.longest is not None:
        raise ValueError(f"--positions is for sinusoidal positions; this model learned {model.config.longest}")
    if format == "ctranslate2":
        kind: Any = quantization or "float32"
        export_ctranslate2(to, model, tokenizers, kind, _POSITIONS if positions is None else positions)
    else:
        data = application.data(**application.read_config(run)["data"])
        reading = {name: getattr(data, name) for name in application.reading}
        export_safetensors(to, model, tokenizers, dtype or "float32", reading)  # type: ignore[arg-type]
    files = ", ".join(sorted(path.name for path in to.iterdir()))
    console.print(f"{to}: {files}")
