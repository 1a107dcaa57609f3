"""`fastformer train lm`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastformer.cli.common import Config, Device, Fallback, Resume, choose_device, report_training, train_app
from fastformer.cli.settings import with_settings
from fastformer.describe import describe_language
from fastformer.language_modelling import LANGUAGE, LanguageDataConfig, LanguageRun
from fastformer.models import LanguageConfig
from fastformer.train import TrainConfig


@train_app.command(name="lm")
@with_settings(data=LanguageDataConfig, model=LanguageConfig, train=TrainConfig)
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
    """Train a language model. Ctrl-C validates, saves and ends; --resume carries on exactly there."""
    if resume:
        if data or model or config:
            raise ValueError("--resume takes its data and model from the run folder; give [train] settings only")
        current = LanguageRun.open(run, train, choose_device(device))
    else:
        file = LANGUAGE.read_settings(config)
        current = LanguageRun.create(
            run,
            LanguageDataConfig(**file["data"] | data),
            file["model"] | model,
            TrainConfig(**file["train"] | train),
            choose_device(device),
        )
    report_training(current, resume, fallback, describe_language(current.model_config))
