"""`fastformer train lm | generate`, and what `evaluate` and `plot` do for language-model runs."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import (
    Checkpoint,
    Device,
    app,
    check_output,
    choose_device,
    console,
)
from fastformer.apps.cli.flags import int_or_text, made, with_settings
from fastformer.apps.cli.help import USE
from fastformer.apps.cli.training import add_training
from fastformer.apps.language.run import APPLICATION, LanguageRun, evaluate_text, load_generator
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.language.text_generator import attend_text
from fastformer.apps.runs.folder import refuse_output
from fastformer.apps.text import checked_lines, write_texts
from fastformer.nn import pack_weights

RUN = Path("runs") / APPLICATION.kind
Folder = Annotated[Path, typer.Option("--run", help=f"run folder, made by `{APPLICATION.command}`")]


add_training(LanguageRun, "Train a language model.")


@app.command(rich_help_panel=USE)
@with_settings(sampling=SamplingOptions)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="one prompt, or several; none: the model begins by itself")
    ] = None,
    run: Folder = RUN,
    prompt_file: Annotated[Path | None, typer.Option(help="file or pipe of prompts, one a line")] = None,
    output: Annotated[Path | None, typer.Option(help="file for the texts; default: standard output")] = None,
    batch_size: Annotated[int, typer.Option(help="texts written at a time", parser=int_or_text)] = 32,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    sampling: dict[str, Any],
) -> None:
    """Let a language model go on from a prompt, word by word, or from several at a time.

    Each text is printed, or written to --output, with its prompt, once it and those before it are finished. Where texts
    have several lines (--no-stop-at-eos), an empty line ends each.
    """
    if prompts and prompt_file is not None:
        raise ValueError("give prompts or --prompt-file, not both")
    check_output(output)
    refuse_output(output, prompt_file, runs=(run,))
    options = made(SamplingOptions, sampling)
    given = iter(prompts or [""]) if prompt_file is None else checked_lines(prompt_file)
    generator = load_generator(run, checkpoint, choose_device(device))
    pack_weights(generator.model)
    given = (prompt.rstrip(" ") for prompt in given)  # the text brings the space between
    if output is None and prompt_file is None and len(prompts or [""]) == 1:
        prompt = next(given)
        pieces = generator.stream(prompt, options)
        print(prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    given, read = itertools.tee(given)
    found = generator.generate_each(read, options, batch_size)
    end = "" if options.stop_at_eos else "\n"
    texts = (f"{prompt}{text}{end}" for prompt, text in zip(given, found, strict=True))
    if output is not None:
        write_texts(output, texts)
        return
    for text in texts:
        print(text, flush=True)


def evaluate_run(run: Path, checkpoint: str, device: str, texts: Any, *, overlap: int | None = None) -> None:
    """Print the perplexity of a part of the run's data or of a file, with the counts of the tokens."""
    text, found = evaluate_text(run, texts, checkpoint, device, overlap or 0)
    console.print(f"{text}; checkpoint {checkpoint}")
    console.print(str(found))


def attention_of(run: Path, checkpoint: str, device: str, text: str) -> Callable[..., Any]:
    """Return what draws the attention maps of a text."""
    return attend_text(load_generator(run, checkpoint, device), text).figure
