"""Run folders of models with random or chosen weights, without training."""

from pathlib import Path
from typing import Any

from fastformer.apps.runs.application import application_for
from fastformer.apps.train import CheckpointFolder, TrainConfig


def save_run(folder: Path, model: Any, *tokenizers: Any, **data: Any) -> None:
    """Write a run of one checkpoint; `data`: settings of the data."""
    CheckpointFolder(folder / "checkpoints").save(1, model.state_dict(), {}, model.config)
    application = application_for(model, tokenizers)
    application.save_tokenizers(folder, tokenizers)
    application.save_settings(folder, data, model.config, TrainConfig(steps=1))
