"""`fastformer evaluate`, for runs of both kinds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.common import Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.settings import made, with_settings
from fastformer.apps.language.run import evaluate_text
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.own_files import refuse_output
from fastformer.apps.text import read_parallel, write_lines
from fastformer.apps.translation.run import TRANSLATION, DataConfig, evaluate, load_translator, read_corpora
from fastformer.apps.translation.search import SearchOptions
from fastformer.settings import check_value


@app.command(name="evaluate")
@with_settings(search=SearchOptions)
def evaluate_command(
    run: RunFolder = Path("runs/translation"),
    split: Annotated[str | None, typer.Option(help="part of the run's data: test (the default) or valid")] = None,
    source: Annotated[
        Path | None, typer.Option(help="file of source sentences, or of a language model's text; instead of --split")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="file of their reference translations")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the translations")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="compare lower-cased")] = False,
    overlap: Annotated[
        int | None,
        typer.Option(help="of a language model: tokens before it that each window reads again (default: 0)"),
    ] = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    search: dict[str, Any],
) -> None:
    """Print a translation run's sacreBLEU and chrF, or a language model's perplexity.

    Translations come from real search; the signatures of the scores and the counts of the tokens are printed with them.
    """
    if split is not None and source is not None:
        raise ValueError("give --split or --source, not both")
    split = split or "test"
    check_value("split", split, str, choices=("test", "valid"))
    if read_kind(run) == "language":
        if target is not None or output is not None or lowercase or search:
            raise ValueError(
                f"{run} is a language-model run; --split, --source, --overlap, --checkpoint and --device are for it"
            )
        text, found = evaluate_text(run, source or split, checkpoint, choose_device(device), overlap or 0)  # type: ignore[arg-type]
        console.print(f"{text}; checkpoint {checkpoint}")
        console.print(str(found))
        return
    if overlap is not None:
        raise ValueError(f"{run} is a translation run; --overlap is for language models")
    options = made(SearchOptions, search)
    data = DataConfig(**TRANSLATION.read_config(run)["data"])
    refuse_output(
        output, source, target, *(path for path in vars(data).values() if isinstance(path, Path)), runs=(run,)
    )
    if (source is None) != (target is None):
        raise ValueError("--source and --target must be given together")
    if source is not None and target is not None:
        corpus = read_parallel(source, target)
    else:
        corpus = read_corpora(data)[split]  # type: ignore[index]
    scores, translations = evaluate(load_translator(run, checkpoint, choose_device(device)), corpus, options, lowercase)
    if output is not None:
        write_lines(output, translations)
    console.print(f"{corpus}; beam {options.beam}, length penalty {options.length_penalty}")
    console.print(str(scores))
