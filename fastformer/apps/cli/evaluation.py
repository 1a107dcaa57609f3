"""`fastformer evaluate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, app, choose_device
from fastformer.apps.cli.dispatch import application_function
from fastformer.apps.cli.flags import int_or_text, with_settings
from fastformer.apps.cli.help import USE
from fastformer.apps.text.scores import BLEU_TOKENIZERS
from fastformer.apps.translation.search import SearchOptions
from fastformer.settings import check_value

_TRANSLATION, _LANGUAGE = "Of translation runs", "Of language-model runs"


@app.command(rich_help_panel=USE)
@with_settings(search=SearchOptions)
def evaluate(
    run: RunFolder = MAIN_RUN,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    split: Annotated[str | None, typer.Option(help="part of the run's data: test (the default) or valid")] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="file of source sentences, of text, or of labelled text, instead of --split"),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="file of reference translations of --source", rich_help_panel=_TRANSLATION)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="file for the translations", rich_help_panel=_TRANSLATION)] = None,
    lowercase: Annotated[
        bool, typer.Option("--lowercase", help="compare lower-cased", rich_help_panel=_TRANSLATION)
    ] = False,
    bleu_tokenizer: Annotated[
        str | None,
        typer.Option(help=f"for BLEU: {', '.join(BLEU_TOKENIZERS)}; default: the run's", rich_help_panel=_TRANSLATION),
    ] = None,
    overlap: Annotated[
        int | None,
        typer.Option(
            help="tokens before it that each window reads again (default: 0)",
            parser=int_or_text,
            rich_help_panel=_LANGUAGE,
        ),
    ] = None,
    *,
    search: dict[str, Any],
) -> None:
    """Print the scores of a run's model on its test data or on a file, and what was compared or counted.

    Translation: sacreBLEU and chrF with their signatures, after a search. Language models: the perplexity. Classifiers:
    accuracy, macro-F1, and precision, recall and F1 of each label, of many labels the most frequent.
    """
    if split is not None and source is not None:
        raise ValueError("give --split or --source, not both")
    check_value("split", split, str | None, choices=("test", "valid"))
    options = {
        "target": target,
        "output": output,
        "lowercase": lowercase,
        "bleu_tokenizer": bleu_tokenizer,
        "overlap": overlap,
        "search": search,
    }
    evaluate_run = application_function(run, "evaluate_run", options)
    evaluate_run(run, checkpoint, choose_device(device), source or split or "test")
