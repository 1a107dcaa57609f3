"""`fastformer train lm`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.apps.cli.common import Config, Device, Fallback, Resume, train_app, train_run
from fastformer.apps.cli.describe import describe_language
from fastformer.apps.cli.settings import with_settings
from fastformer.apps.language.model import LanguageConfig
from fastformer.apps.language.run import LanguageDataConfig, LanguageRun, LanguageTrainConfig


@train_app.command(name="lm")
@with_settings(data=LanguageDataConfig, model=LanguageConfig, train=LanguageTrainConfig)
def train_language_model(
    run: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/language"),
    config: Config = None,
    resume: Resume = False,
    fallback: Fallback = False,
    device: Device = "auto",
    *,
    data: dict[str, Any],
    model: dict[str, Any],
    train: dict[str, Any],
) -> None:
    """Train a language model.

    Ctrl-C, SIGTERM or SIGHUP saves, validates and ends; --resume carries on exactly there.
    """
    settings = {"data": data, "model": model, "train": train}
    train_run(LanguageRun, describe_language, run, config, resume, fallback, device, settings)
