"""`fastformer export`."""

from pathlib import Path
from typing import Annotated

import typer

from fastformer.cli.common import Checkpoint, RunFolder, app, console
from fastformer.export import Model, export_ctranslate2, export_safetensors
from fastformer.language_modelling import load_generator
from fastformer.runs import read_kind
from fastformer.translation import load_translator

FORMATS = ("ctranslate2", "safetensors")


@app.command()
def export(
    to: Annotated[Path, typer.Option(help="folder to make")],
    run: RunFolder = Path("runs/translation"),
    format: Annotated[str, typer.Option(help="ctranslate2 or safetensors")] = "ctranslate2",
    quantization: Annotated[
        str, typer.Option(help="of CTranslate2's weights: float32, float16, bfloat16, int16, int8, int8_float16, …")
    ] = "float32",
    dtype: Annotated[str, typer.Option(help="of safetensors: float32, float16 or bfloat16")] = "float32",
    positions: Annotated[
        int, typer.Option(help="longest sequence in CTranslate2, where positions are sinusoidal")
    ] = 2048,
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a run's model and tokenizers for another program."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    if read_kind(run) == "translation":
        translator = load_translator(run, checkpoint)
        model: Model = translator.model
        tokenizers = [translator.source_tokenizer, translator.target_tokenizer]
    else:
        generator = load_generator(run, checkpoint)
        model, tokenizers = generator.model, [generator.tokenizer]
    if format == "ctranslate2":
        export_ctranslate2(to, model, tokenizers, quantization, positions)  # type: ignore[arg-type]
    else:
        export_safetensors(to, model, tokenizers, dtype)  # type: ignore[arg-type]
    files = ", ".join(sorted(path.name for path in to.iterdir()))
    console.print(f"{to}: {files}")
