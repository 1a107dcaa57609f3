"""`fastformer demo | train | translate | score`, and `evaluate`, `plot` and `serve` for translation runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import (
    MAIN_RUN,
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
from fastformer.apps.cli.options import START, USE, whole_number, with_settings
from fastformer.apps.cli.training import add_training
from fastformer.apps.models.sampling import RandomStreams
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.worker import ServedModel
from fastformer.apps.settings import make_settings
from fastformer.apps.text import read_lines, read_parallel
from fastformer.apps.text.scores import PairedScore, check_bleu_tokenizer, compare_translations
from fastformer.apps.train.validation import to_perplexity
from fastformer.apps.translation.run import (
    APPLICATION,
    DataConfig,
    TranslationRun,
    evaluate,
    load_translator,
    read_corpora,
)
from fastformer.apps.translation.search import SearchOptions
from fastformer.apps.translation.translator import Kind, Translation
from fastformer.nn import pack_weights

_READ_AHEAD = 16  # batches, in which sentences of similar length are translated together
_EMPTY = Translation("", -math.inf, -math.inf)  # fills the lines of a sentence up to n_best


@app.command(rich_help_panel=START)
def demo(
    target: Annotated[str, typer.Option(help="fr or de")] = "fr",
    run: Annotated[Path, typer.Option(help="folder for the run, new or empty")] = Path("demo"),
    device: Device = "auto",
) -> None:
    """Train on generated number words, translate held-out numbers and draw an attention map. About a minute."""
    from fastformer.apps.translation.demo import run_demo

    run_demo(run, target, choose_device(device), console)


add_training(TranslationRun, "Train a translation model; the commands of `fastformer train` train other models.")


@app.command(rich_help_panel=USE)
@with_settings(search=SearchOptions)
def translate(
    sentences: Annotated[list[str] | None, typer.Argument(help="sentences; none: read them from --input")] = None,
    run: RunFolder = MAIN_RUN,
    input: Input = None,
    output: Output = None,
    scores: Annotated[bool, typer.Option("--scores", help="print the score before each translation")] = False,
    batch_size: Annotated[int, whole_number("sentences translated at a time")] = 64,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    search: dict[str, Any],
) -> None:
    """Translate sentences, a file, or standard input: with --n-best n lines each, the last empty if there are fewer.

    Sentences from a pipe are translated and printed by batch: with --batch-size 1, each gets its answer at once.
    """
    check_output(output, input, run=run)
    batches = input_batches(sentences, input, output, "sentences", batch_size, _READ_AHEAD)
    options = make_settings(SearchOptions, search)
    translator = load_translator(run, checkpoint, choose_device(device))
    pack_weights(translator.model)
    streams = RandomStreams(options.seed)
    candidates = (each for lines in batches for each in translator.candidates(lines, options, batch_size, streams))
    padded = (c for each in candidates for c in each + [_EMPTY] * (options.n_best - len(each)))
    put_lines((f"{c.score:.4f}\t{c.text}" if scores else c.text for c in padded), output)


@app.command(rich_help_panel=USE)
def score(
    source: Annotated[Path, typer.Option(help="file of source sentences, one a line, plain or compressed")],
    target: Annotated[Path, typer.Option(help="file of their translations, line by line")],
    run: RunFolder = MAIN_RUN,
    output: Output = None,
    batch_size: Annotated[int, whole_number("pairs scored at a time")] = 64,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Score given translations; print a line for each pair, separated by tabs.

    It has the natural logarithm of the probability, the number of target tokens with eos, and the perplexity per token.
    """
    check_output(output, source, target, run=run)
    sources, targets = ([line.strip() for line in read_lines(path)] for path in (source, target))
    if len(sources) != len(targets):
        raise ValueError(f"{source} has {len(sources):,} lines but {target} has {len(targets):,}; they must be pairs")
    translator = load_translator(run, checkpoint, choose_device(device))
    scores = translator.score(sources, targets, batch_size)
    put_lines((f"{log_p:.4f}\t{n}\t{to_perplexity(-log_p / n):.4f}" for log_p, n in scores), output)


def evaluate_run(
    run: Path,
    checkpoint: str,
    device: str,
    texts: Any,
    *,
    target: list[Path] | None = None,
    output: Path | None = None,
    lowercase: bool = False,
    bleu_tokenizer: str | None = None,
    bootstrap: int | None = None,
    search: dict[str, Any],
) -> None:
    """Print BLEU, chrF and TER on the run's test or validation pairs, or on a source file and its references."""
    source = texts if isinstance(texts, Path) else None
    options = make_settings(SearchOptions, search)
    if "n_best" in search:
        raise ValueError("n_best has no effect here: the best translation is scored; leave it out")
    data = DataConfig(**APPLICATION.read_config(run)["data"])
    tokenizer = bleu_tokenizer or data.tokenizer_for_bleu
    check_bleu_tokenizer(tokenizer)
    check_output(output, source, *(target or ()), *data.files(), run=run)
    if (source is None) != (not target):
        raise ValueError("--source and --target must be given together")
    corpus = read_parallel(source, target[0]) if source and target else read_corpora(data)[texts]
    more = [[line.strip() for line in read_lines(path)] for path in (target or ())[1:]]
    for path, lines in zip((target or ())[1:], more, strict=True):
        if len(lines) != len(corpus):
            raise ValueError(
                f"{path} has {len(lines):,} lines for {len(corpus):,} pairs; several references need files of equal "
                "length without empty lines"
            )
    translator = load_translator(run, checkpoint, device)
    pack_weights(translator.model)
    scores, translations = evaluate(
        translator, corpus, options, lowercase, tokenizer, more_references=more, bootstrap=bootstrap or 0
    )
    if output is not None:
        put_lines(translations, output)
    is_beam = options.beam > 1 and not options.sample
    beam = f"beam {options.beam}, length penalty {options.length_penalty}"
    console.print(f"{corpus}; {beam if is_beam else options.search}; checkpoint {checkpoint}")
    console.print(str(scores))


def compare_systems(runs: Sequence[Path], bootstrap: int) -> list[PairedScore]:
    """Translate the test data of the first run with each run's best weights, and compare by paired bootstrap."""
    data = DataConfig(**APPLICATION.read_config(runs[0])["data"])
    check_bleu_tokenizer(data.tokenizer_for_bleu)
    corpus = read_corpora(data)["test"]
    systems = {}
    for run in runs:
        translator = load_translator(run)
        pack_weights(translator.model)
        systems[str(run)] = translator.translate(corpus.source)
    console.print(f"{corpus}; beam {SearchOptions.beam}")
    return compare_translations(systems, corpus.target, data.tokenizer_for_bleu, bootstrap)


def attention_of(
    run: Path, checkpoint: str, device: str, source: str, target: str | None = None, kind: Kind | None = None
) -> tuple[AttentionMaps, str]:
    """Return the attention maps of a sentence and its translation, and both as a line."""
    maps = load_translator(run, checkpoint, device).attend(source, target, kind or "cross")
    return maps, f"{maps.title[1]}\n"


def serve_run(run: Path, checkpoint: str, device: str) -> ServedModel:
    """Return the endpoint that translates, with the n best translations and their scores."""
    translator = load_translator(run, checkpoint, device)
    pack_weights(translator.model)

    def translate(texts: list[str], options: SearchOptions) -> list[Any]:
        return [
            {"translations": [{"text": best.text, "score": round(best.score, 4)} for best in each]}
            for each in translator.candidates(texts, options)
        ]

    return ServedModel("translate", SearchOptions, translate, translator.attend)
