"""`fastformer serve | evaluate | export | info`, for runs of every kind, and `fastformer --version`."""

import functools
import inspect
import os
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import fastformer
from fastformer.apps.cli.console import MAIN_RUN, Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.options import SHARE, USE, flag, whole_number, with_settings
from fastformer.apps.export import export_ctranslate2, export_safetensors
from fastformer.apps.models.sizes import describe_model
from fastformer.apps.runs.application import application_of
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.text.scores import BLEU_TOKENIZERS
from fastformer.apps.train import CheckpointFolder
from fastformer.apps.translation.search import SearchOptions
from fastformer.backend import Backend
from fastformer.functional import explain
from fastformer.functional.choice import INSTALL_TRITON
from fastformer.settings import check_value

_TRANSLATION = "Of translation runs"
_ABSENT = "not installed"


def application_function(run: Path, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function from the `commands.py` of a run's application, with its options bound.

    options: those of all applications; None, False and {} mean not given. Raises ValueError for an option that is
    missing, or not for runs of this kind.
    """
    application = application_of(read_kind(run))
    function = getattr(import_module(f"fastformer.apps.{application.kind}.commands"), name)
    about = f"{run} is a {application.title} run"
    parameters = inspect.signature(function).parameters
    for option, value in options.items():
        if option in parameters and value is None and parameters[option].default is inspect.Parameter.empty:
            raise ValueError(f"{about}; give {flag(option)}")
        if option not in parameters and value not in (None, False, {}):
            raise ValueError(f"{about}; {flag(next(iter(value)) if isinstance(value, dict) else option)} is not for it")
    return functools.partial(function, **{name: value for name, value in options.items() if name in parameters})


@app.command(rich_help_panel=USE)
def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0: every network")] = "127.0.0.1",
    port: Annotated[int, whole_number("port to listen at; 0: any free one")] = 8000,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Serve a page and a JSON API on this machine to try a run's model. Ctrl-C ends it."""
    try:
        import uvicorn

        from fastformer.apps.serve.api import Api
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ImportError(f"serving needs {error.name}: pip install 'fastformer[serve]'") from None
    check_value("port", port, int, at_least=0, at_most=65_535)
    with listen(host, port) as listener:
        model = application_function(run, "serve_run", {})(run, checkpoint, choose_device(device))
        application = Api(model, Path(run).resolve().name).application(host)
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        console.print(f"Serving {run} at http://{shown}:{address[1]} (Ctrl-C ends)")
        logs: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
        config = uvicorn.Config(application, **logs, lifespan="off", timeout_graceful_shutdown=5, timeout_keep_alive=75)
        with suppress(KeyboardInterrupt):  # raised again by uvicorn after a clean end
            uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; OSError names the address and the reason."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python repeats the address
        raise OSError(f"cannot listen at {host}:{port}: {reason}; choose another --port or --host") from None


@app.command(rich_help_panel=USE)
@with_settings(hidden=("n_best",), search=SearchOptions)
def evaluate(
    run: RunFolder = MAIN_RUN,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    split: Annotated[str | None, typer.Option(help="part of the run's data: test (the default) or valid")] = None,
    source: Annotated[
        Path | None, typer.Option(help="file of source sentences, of text, or of labelled text, instead of --split")
    ] = None,
    target: Annotated[
        list[Path] | None,
        typer.Option(help="file of reference translations of --source; may be repeated", rich_help_panel=_TRANSLATION),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="file for the translations", rich_help_panel=_TRANSLATION)] = None,
    lowercase: Annotated[
        bool, typer.Option("--lowercase", help="compare lower-cased", rich_help_panel=_TRANSLATION)
    ] = False,
    bleu_tokenizer: Annotated[
        str | None,
        typer.Option(help=f"for BLEU: {', '.join(BLEU_TOKENIZERS)}; default: the run's", rich_help_panel=_TRANSLATION),
    ] = None,
    bootstrap: Annotated[
        int | None, whole_number("resamples of the sentences for 95 % intervals, such as 1000", _TRANSLATION)
    ] = None,
    *,
    search: dict[str, Any],
) -> None:
    """Print the scores of a run's model on its test data or on a file, and what was compared or counted.

    Translation: sacreBLEU, chrF and TER with their signatures, after a search. Language models: the perplexity.
    Classifiers: accuracy, macro-F1, and precision, recall and F1 of each label.
    """
    if split is not None and source is not None:
        raise ValueError("give --split or --source, not both")
    check_value("split", split, str | None, choices=("test", "valid"))
    check_value("bootstrap", bootstrap, int | None, at_least=2)
    options = {
        "target": target or None,
        "output": output,
        "lowercase": lowercase,
        "bleu_tokenizer": bleu_tokenizer,
        "bootstrap": bootstrap,
        "search": search,
    }
    evaluate_run = application_function(run, "evaluate_run", options)
    evaluate_run(run, checkpoint, choose_device(device), source or split or "test")


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
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a run's model and tokenizers for another program."""
    if Path(os.path.realpath(to)).is_relative_to(os.path.realpath(run)):  # unlike resolve, takes a loop of links
        raise ValueError(f"--to {to} is in the run folder {run}; choose a folder outside")
    check_value("format", format, str, choices=("ctranslate2", "safetensors"))
    if format == "safetensors" and quantization is not None:
        raise ValueError("--quantization is not for format safetensors; leave it out")
    application = application_of(read_kind(run))
    model, tokenizers = application.load_weights(run, checkpoint), application.load_tokenizers(run)
    if format == "ctranslate2":
        export_ctranslate2(to, model, tokenizers, quantization or "float32")  # type: ignore[arg-type]
    else:
        data = application.data(**application.read_config(run)["data"])
        export_safetensors(to, model, tokenizers, application.settings_of_text(data))
    console.print(f"{to}: {', '.join(sorted(path.name for path in to.iterdir()))}")


def _show_version(requested: bool) -> None:
    if requested:
        console.print(f"fastformer {fastformer.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Take the options of no command."""


@app.command(rich_help_panel=SHARE)
def info(run: Annotated[Path | None, typer.Option(help="run folder to describe, too")] = None) -> None:
    """Show versions, devices, which backend would run and why; with --run, the run's model and checkpoints."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = fastformer.get_backend()
    others = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "sentencepiece"))
    triton = next((v for v in map(_version, ("triton", "triton-windows")) if v != _ABSENT), None)
    interpreter = os.environ.get("TRITON_INTERPRET")
    about_triton = f"{triton}{(interpreter and f', TRITON_INTERPRET={interpreter}') or ''}"
    gpus = [
        f"GPU {i}: {x.name}, compute capability {x.major}.{x.minor}, {x.multi_processor_count} multiprocessors, "
        f"{x.total_memory / 2**30:.0f} GiB"
        for i, x in enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    ]
    lines = [
        f"fastformer {fastformer.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {others}",
        f"Triton: {about_triton if triton else f'not installed ({INSTALL_TRITON})'}",
        f"CPU threads: {torch.get_num_threads()}",
        *(gpus or ["GPU: none"]),
        f"backend: {choice} (environment variable FASTFORMER_BACKEND=auto|triton|reference)",
    ]
    if choice != "auto":
        lines += [f"with it, a float32 tensor on {device} takes", *_ops(choice, device)]
    lines += [f"with backend auto, a float32 tensor on {device} takes", *_ops("auto", device)]
    if run is not None:
        application = application_of(read_kind(run))
        settings = application.read_config(run)
        described = describe_model(application.network, application.model(**settings["model"]))
        checkpoints = CheckpointFolder(run / "checkpoints")
        best, last = (path.name if path else "none" for path in (checkpoints.best(), checkpoints.last()))
        value = checkpoints.best_value()
        score = "" if value is None else f" ({settings['train'].get('metric', 'loss')} {value:.4g})"
        lines.append(f"{run}: {application.title} run, {described}")
        average = ", average" if (checkpoints.folder / checkpoints.index()["average"]).is_dir() else ""
        lines.append(f"  checkpoints: best {best}{score}, last {last}{average}")
    console.print("\n".join(lines))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _ops(choice: Backend, device: str) -> list[str]:
    """Return a line for each verdict of `explain`, with the ops that share it."""
    ops_of: dict[str, list[str]] = {}
    with fastformer.backend(choice):
        for line in explain(torch.empty(0, device=device)).splitlines():
            op, verdict = line.split(": ", 1)
            ops_of.setdefault(verdict.replace(f"({op} ", "("), []).append(op)
    return [f"  {', '.join(ops)}: {verdict}" for verdict, ops in ops_of.items()]
