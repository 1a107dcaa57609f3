"""`fastformer train classify | classify`, and `evaluate`, `plot` and `serve` for classification runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.classification.classifier import Classifier
from fastformer.apps.classification.run import APPLICATION, ClassificationRun, load_classifier
from fastformer.apps.classification.run import evaluate as evaluate_folder
from fastformer.apps.cli.console import (
    Checkpoint,
    Device,
    Input,
    Output,
    RunFolder,
    app,
    check_output,
    choose_device,
    console,
    input_batches,
    put_lines,
)
from fastformer.apps.cli.options import USE, whole_number
from fastformer.apps.cli.training import add_training
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.worker import ServedModel
from fastformer.apps.settings import Settings

add_training(ClassificationRun, "Train a classifier of texts.")


@app.command(rich_help_panel=USE)
def classify(
    texts: Annotated[list[str] | None, typer.Argument(help="texts; none: read them from --input")] = None,
    run: RunFolder = Path("runs") / APPLICATION.kind,
    input: Input = None,
    output: Output = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="every label and its probability, the most probable first")
    ] = False,
    batch_size: Annotated[int, whole_number("texts read at a time")] = 64,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Print the label of each text, a line each; with --probabilities all labels, separated by tabs.

    Texts are read, labelled and printed by batch: with --batch-size 1, each from a pipe gets its label at once.
    """
    check_output(output, input, run=run)
    batches = input_batches(texts, input, output, "texts", batch_size)
    classifier = load_classifier(run, checkpoint, choose_device(device))
    label: Any = _rank if probabilities else Classifier.classify
    put_lines((line for batch in batches for line in label(classifier, batch, batch_size)), output)


def _rank(classifier: Classifier, texts: list[str], batch_size: int) -> list[str]:
    ranked = classifier.ranked(texts, batch_size)
    return ["\t".join(f"{label}\t{p:.4f}" for label, p in row) for row in ranked]


def evaluate_run(run: Path, checkpoint: str, device: str, texts: Any) -> None:
    """Print accuracy, macro-F1, and the scores of each label."""
    corpus, scores = evaluate_folder(run, texts, checkpoint, device)
    console.print(f"{corpus}; checkpoint {checkpoint}")
    width = max(len("label"), *map(len, scores.labels))
    console.print(f"{'label':{width}}  {'texts':>7}  precision  recall      F1")
    for label, (count, precision, recall, f1) in scores.each.items():
        console.print(f"{label:{width}}  {count:>7,}  {precision:9.4f}  {recall:.4f}  {f1:.4f}")
    console.print(str(scores))


def attention_of(run: Path, checkpoint: str, device: str, text: str) -> tuple[AttentionMaps, str]:
    """Return the attention maps of a text, and its label as a line."""
    classifier = load_classifier(run, checkpoint, device)
    return classifier.attend(text), f"{classifier.classify([text])[0]}\n"


class NoSettings(Settings):
    """The settings of a request for a label: none."""


def serve_run(run: Path, checkpoint: str, device: str) -> ServedModel:
    """Return the endpoint that gives every label with its probability, the most probable first."""
    classifier = load_classifier(run, checkpoint, device)

    def classify(texts: list[str], options: NoSettings) -> list[Any]:
        ranked = classifier.ranked(texts)
        return [{"labels": [{"label": label, "probability": round(p, 4)} for label, p in row]} for row in ranked]

    return ServedModel("classify", NoSettings, classify, classifier.attend)
