"""`fastformer data`, `fastformer train` and the commands below it: one for each application, with a flag a setting."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.console import Device, app, choose_device, console
from fastformer.apps.cli.options import TRAIN, App, flag, with_settings
from fastformer.apps.models.sizes import describe_model
from fastformer.apps.runs.application import PRETRAINED
from fastformer.apps.runs.folder import CONFIG, MAIN, is_config_of_run, read_run_section, refuse_output
from fastformer.apps.runs.run import Run
from fastformer.apps.text import DATASETS, prepare
from fastformer.apps.train import Processes, join_processes, read_metrics
from fastformer.apps.train.processes import local_device

_HOW = """Settings that are not given are chosen for the corpus, the budget and the speed of this machine, and printed.

Ctrl-C saves, validates and ends; --resume continues exactly there."""


@app.command(rich_help_panel=TRAIN)
def data(
    name: Annotated[str, typer.Argument(help=" | ".join(DATASETS))],
    source: Annotated[Path, typer.Option("--from", help="folder that holds the dataset's files")],
    to: Annotated[Path | None, typer.Option(help="folder to make; default: data/NAME")] = None,
) -> None:
    """Check a dataset's files and prepare them. Nothing is fetched."""
    console.print(prepare(name, source, to or Path("data") / name))


train_app = App(invoke_without_command=True)
app.add_typer(train_app, name="train", rich_help_panel=TRAIN)


def add_training(kind: type[Run], what: str) -> None:
    """Register the command that trains runs of a kind; `what` is the first sentence of the help."""
    application = kind.application

    @with_settings(
        data=application.data, model=application.model, train=application.train, chosen=application.automatic
    )
    def command(
        call: typer.Context,
        run: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs") / application.kind,
        config: Annotated[
            Path | None, typer.Option(help="TOML file with sections data, model, train; flags override it")
        ] = None,
        resume: Annotated[
            bool, typer.Option(help="continue the run in --run; only settings of train may be given")
        ] = False,
        device: Device = "auto",
        pretrained: Annotated[
            Path | None,
            typer.Option(
                "--from",
                help="folder of a run, an exported model, or a Marian model, to train further; its model settings hold",
            ),
        ] = None,
        *,
        data: dict[str, Any],
        model: dict[str, Any],
        train: dict[str, Any],
    ) -> None:
        if call.invoked_subcommand is not None:
            for name in call.params:
                source = call.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    raise ValueError(f"{flag(name)} must come after {call.invoked_subcommand}")
            return
        if resume and (data or model or config or pretrained):
            raise ValueError("--resume takes its data and model from the run folder; give [train] settings only")
        device = local_device(choose_device(device))
        with join_processes(device) as processes:
            flags = {"data": data, "model": model, "train": train}
            new = None if resume else _create(kind, run, config, flags, device, pretrained)
            _fit(new or kind.open(run, train, device), processes, resume)

    command.__doc__ = f"{what}\n\n{_HOW}"
    name = application.command.split()[-1]
    main = application.kind == MAIN
    (train_app.callback() if main else train_app.command(name, rich_help_panel=TRAIN))(command)


def _create(
    kind: type[Run],
    folder: Path,
    config: Path | None,
    flags: dict[str, dict[str, Any]],
    device: str,
    pretrained: Path | None,
) -> Run:
    """Create a run from a file of settings and from flags, which override the file."""
    application, settings = kind.application, flags
    if config is not None:
        refuse_output(folder / CONFIG, config)
        settings = {name: values | flags[name] for name, values in application.read_settings(config).items()}
        if settings["data"].get("tokenizer") == PRETRAINED and pretrained is None:
            origin = read_run_section(config).origin
            pretrained = None if origin is None else Path(origin)
    begun = {} if pretrained is None else {"tokenizer": PRETRAINED}
    data, train = application.data(**begun | settings["data"]), application.train(**settings["train"])
    model, named = settings["model"], {name: set(values) for name, values in settings.items()}
    # A file may state defaults that have no effect, and the config.toml of a run other settings, too.
    kinds = {"data": application.data, "model": application.model, "train": application.train}
    of_run = config is not None and is_config_of_run(config)
    checked = {
        section: {
            name
            for name, x in values.items()
            if name in flags[section] or not (of_run or x == getattr(kinds[section], name, None))
        }
        for section, values in settings.items()
    }
    application.reject_unused_options(checked, data, model, train, device)
    return kind.create(folder, data, model, train, device, pretrained, named, console.print)


def _fit(run: Run, processes: Processes, resume: bool) -> None:
    """Train a run; print the data, the model and the outcome, and draw the learning curve."""
    from fastformer.apps.plots import plot_history, save

    if processes.is_main:
        report, model = run.data_report(), describe_model(run.application.network, run.model_config)
        read = report["corpora"].values() if resume else ()  # a new run has printed them
        for line in (*read, f"training: {report['training']}", f"model: {model}"):
            console.print(line)
        for line in run.choice.lines if run.choice else ():
            console.print(line)
        if processes.world > 1:
            console.print(f"processes: {processes.world}, {run.train_config.parallel}")
    cpu = time.process_time()
    result = run.fit(resume)
    cpu = time.process_time() - cpu
    if processes.is_main:
        save(plot_history({run.folder.name: read_metrics(run.folder)}), run.folder / "history.png")
        console.print(
            f"run folder: {run.folder}; {result.seconds:,.0f} s of training ({cpu:,.0f} s of CPU time in this session)"
        )
