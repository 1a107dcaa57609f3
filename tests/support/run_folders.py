"""Run folders of models with random or chosen weights, without training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastformer.apps.runs.application import complete_run
from fastformer.apps.train import CheckpointFolder, TrainConfig


def save_run(folder: Path, model: Any, *tokenizers: Any, **data: Any) -> None:
    """Write a run of one checkpoint; `data` as in `complete_run`."""
    CheckpointFolder(folder / "checkpoints").save(1, model.state_dict(), {}, model.config)
    trainer: Any = SimpleNamespace(folder=folder, model=model, config=TrainConfig(steps=1))
    complete_run(trainer, *tokenizers, **data)
