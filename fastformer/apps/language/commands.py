"""`fastformer train lm | generate`, and `evaluate`, `plot` and `serve` for language-model runs."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import (
    Checkpoint,
    Device,
    Output,
    RunFolder,
    app,
    check_output,
    choose_device,
    console,
    put_texts,
)
from fastformer.apps.cli.options import USE, whole_number, with_settings
from fastformer.apps.cli.training import add_training
from fastformer.apps.language.run import APPLICATION, LanguageRun, evaluate_text, load_generator
from fastformer.apps.language.sampling import SamplingOptions
from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.serve.worker import ServedModel
from fastformer.apps.settings import make_settings
from fastformer.apps.text.files import checked_lines
from fastformer.nn import pack_weights

add_training(LanguageRun, "Train a language model.")


@app.command(rich_help_panel=USE)
@with_settings(sampling=SamplingOptions)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="one or several prompts; without one, the model starts a text")
    ] = None,
    run: RunFolder = Path("runs") / APPLICATION.kind,
    prompt_file: Annotated[
        Path | None, typer.Option(help="file or pipe of prompts, one a line; /dev/stdin: standard input")
    ] = None,
    output: Output = None,
    batch_size: Annotated[int, whole_number("texts written at a time")] = 32,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    *,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt with a language model, or several prompts at a time.

    Each text is printed, or written to --output, after its prompt, batch by batch. With --no-stop-at-eos, texts may
    have several lines, and an empty line ends each text.
    """
    if prompts and prompt_file is not None:
        raise ValueError("give prompts or --prompt-file, not both")
    check_output(output, prompt_file, run=run)
    options = make_settings(SamplingOptions, sampling)
    lines = iter(prompts or [""]) if prompt_file is None else checked_lines(prompt_file)
    generator = load_generator(run, checkpoint, choose_device(device))
    pack_weights(generator.model)
    # The generated text begins with the space.
    lines, copies = itertools.tee(prompt.rstrip(" ") for prompt in lines)
    generated = generator.generate_each(copies, options, batch_size)
    end = "" if options.stop_at_eos else "\n"
    put_texts((f"{prompt}{text}{end}" for prompt, text in zip(lines, generated, strict=True)), output)


def evaluate_run(run: Path, checkpoint: str, device: str, texts: Any) -> None:
    """Print the perplexity of the run's test or validation text, or of a file, with token counts."""
    text, result = evaluate_text(run, texts, checkpoint, device)
    console.print(f"{text}; checkpoint {checkpoint}")
    console.print(str(result))


def attention_of(run: Path, checkpoint: str, device: str, text: str) -> tuple[AttentionMaps, str]:
    """Return the attention maps of a text, and nothing to print."""
    return load_generator(run, checkpoint, device).attend(text), ""


def serve_run(run: Path, checkpoint: str, device: str) -> ServedModel:
    """Return the endpoint that continues prompts, whole or as a stream."""
    generator = load_generator(run, checkpoint, device)
    pack_weights(generator.model)

    def generate(prompts: list[str], options: SamplingOptions) -> list[Any]:
        return [{"text": text} for text in generator.generate(prompts, options)]

    return ServedModel("generate", SamplingOptions, generate, generator.attend, generator.stream)
