"""What all commands share: the application they register with, the console, and options that several of them have."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fastformer.apps.runs.kinds import main_application
from fastformer.apps.runs.own_files import CONFIG, refuse_output
from fastformer.apps.system.terminal import Terminal, shown
from fastformer.apps.text import decode_lines, read_lines, write_lines

if TYPE_CHECKING:
    from fastformer.apps.runs.run import Run


class _Console(Console):
    """Shows every string, those in tables too, as `shown` has it; [brackets] and :words: in them are text."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


app = typer.Typer(
    help="Transformers without work on padding: train, translate, evaluate. Start with: fastformer demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = _Console()

train_app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.add_typer(train_app, name="train")

Resume = Annotated[bool, typer.Option(help="continue the run in --run; only settings of train may be given")]
Fallback = Annotated[bool, typer.Option(help="with --resume: if the last checkpoint is damaged, take the one before")]
Config = Annotated[Path | None, typer.Option(help="TOML file with sections data, model, train; flags override it")]
RunFolder = Annotated[Path, typer.Option("--run", help="run folder, of any kind")]
MAIN_RUN = Path("runs") / main_application().kind
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes a GPU where there is one")]
Checkpoint = Annotated[str, typer.Option(help="best, last or average")]


def train_run(
    kind: "type[Run]",
    folder: Path,
    config: Path | None,
    resume: bool,
    fallback: bool,
    device: str,
    settings: Mapping[str, dict[str, Any]],
) -> None:
    """Make a run or open one, train it, say what is read, what learns and how it ended, and draw the learning curve.

    Nothing that is said keeps it from training. Asked to end by SIGTERM or SIGHUP, it exits with 128 and their number.

    Args:
        kind: of the run.
        folder: of the run.
        config: see `Config`.
        resume: continue from the last checkpoint.
        fallback: where that one is damaged, take the one before.
        device: see `Device`.
        settings: what was given as flags, by section: data, model, train.
    """
    from fastformer.apps.plots import plot_history, save
    from fastformer.apps.train import join_processes, read_metrics
    from fastformer.apps.train.processes import local_device

    if fallback and not resume:
        raise ValueError("--fallback is for a run that goes on; give --resume too, or leave it out")
    if resume and (settings["data"] or settings["model"] or config):
        raise ValueError("--resume takes its data and model from the run folder; give [train] settings only")
    device, terminal = local_device(choose_device(device)), Terminal(sys.stdout)
    with join_processes(device) as processes:
        if resume:
            run = kind.open(folder, settings["train"], device)
        else:
            application = kind.application
            if config is not None:
                refuse_output(folder / CONFIG, config)
            file = application.read_settings(config)
            data, model, train = (file[name] | settings[name] for name in ("data", "model", "train"))
            text, settled = application.data(**data), application.train(**train)
            given = {"data": data, "model": model, "train": train}
            application.refuse_idle(given, text, model, settled, device)
            run = kind.create(folder, text, model, settled, device)
        if processes.is_main:
            report = run.data_report()
            about = run.application.describe(run.model_config)
            for line in (*report["corpora"].values(), f"training: {report['training']}", f"model: {about}"):
                terminal.line(line)
            if processes.world > 1:
                terminal.line(f"processes: {processes.world}, {run.train_config.parallel}")
        with run.writing():
            cpu = time.process_time()
            result = run.fit(resume, fallback)
            cpu = time.process_time() - cpu
            if processes.is_main:
                picture = plot_history({run.folder.name: read_metrics(run.folder)})
                save(picture, run.folder / "history.png", run.folder)
                terminal.line(
                    f"ended after {result.step:,} steps, {result.seconds:,.0f} s ({cpu:,.0f} CPU-seconds in this "
                    f"session): {result.reason}; run folder: {run.folder}"
                )
    if result.signal is not None and result.signal != signal.SIGINT:
        raise typer.Exit(128 + result.signal)


def given_lines(texts: list[str] | None, input: Path | None, output: Path | None, what: str) -> Iterator[list[str]]:
    """What a command is to read: its arguments, a file or standard input, in one list; or what is typed, line by line.

    Args:
        texts: the arguments.
        input: the file.
        output: where what is made of them goes; None: standard output, as typed lines want it.
        what: the texts are, for messages.

    Raises:
        ValueError: there are arguments and a file, or neither and standard input is closed; or lines are to be typed
            and something is to be written to a file. At once; what is wrong with a file, when it is read.
    """
    if texts and input is not None:
        raise ValueError(f"give {what} or --input, not both")
    if not texts and input is None and sys.stdin is None:  # translate <&-
        raise ValueError(f"standard input is closed: give {what}, or --input")
    typed = not texts and input is None and sys.stdin.isatty()
    if typed and output is not None:
        raise ValueError(f"--output is for {what} that are given, or in a file: give them, or --input")
    return _typed_lines() if typed else _lines_at_once(texts, input)


def _typed_lines() -> Iterator[list[str]]:
    console.print("Type a line and press Enter; Ctrl-D ends.", style="dim")
    for line in sys.stdin:
        yield [line.strip()]


def _lines_at_once(texts: list[str] | None, input: Path | None) -> Iterator[list[str]]:
    if texts:
        yield texts
    else:
        yield read_lines(input) if input is not None else decode_lines(sys.stdin.buffer.read(), "standard input")


def put_lines(lines: Iterable[str], output: Path | None) -> None:
    """Write lines to a file, whole or not at all; or to standard output, one after another."""
    if output is not None:
        write_lines(output, lines)
        return
    for line in lines:
        print(shown(line), flush=True)


def choose_device(name: str) -> str:
    """Resolve auto, and check that torch has the device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return name
