"""Reject settings that would only fail late, before data is read and a folder is created."""

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastformer import functional
from fastformer.apps.models.sizes import check_memory
from fastformer.apps.runs.application import Application
from fastformer.apps.train import Checkpoint, CheckpointError, CheckpointFolder, Processes, TrainConfig, read_metrics
from fastformer.apps.train.config import check_machine


def check_settings(
    application: Application,
    computed: tuple[str, ...],
    data: Any,
    model: Mapping[str, Any],
    train: TrainConfig,
    device: torch.device | str,
) -> None:
    """Raise an error for a metric that is not computed, a backend that cannot run here, or heads that do not fit.

    Args:
        application: kind of the run.
        computed: names of the metrics that validation computes.
        data, train: settings.
        model: settings of the model, without those computed from the tokenizers.
        device: of the model.

    Raises:
        ValueError: naming the setting, what it was, and what is allowed.
        FileNotFoundError: a file of the data is not there.
        ImportError: a package that the run needs is not installed.
        fastformer.backend.BackendError: the chosen backend cannot run here.
    """
    config = application.planned(model, data)
    check_memory(config)
    try:
        x = torch.empty(1, 1, 1, config.d_model // config.heads, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # AssertionError: torch without CUDA
        raise ValueError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    if x.is_meta:
        raise ValueError(f"device={str(device)!r} cannot be used: its tensors hold no values")
    functional.check_backend(x)
    check_machine(train, device, Processes.current().world)
    known = application.metrics
    if train.metric not in known:
        raise ValueError(f"metric={train.metric!r} is no value of this validation; choose {', '.join(known)}")
    if train.metric not in computed:
        raise ValueError(f"metric={train.metric!r} is not computed here; it needs {known[train.metric]}")
    for package, needed in (("sacrebleu", "bleu" in computed), ("tensorboard", train.tensorboard)):
        if needed and importlib.util.find_spec(package) is None:
            extra = "tensorboard" if package == "tensorboard" else "apps"
            raise ImportError(f"this run needs {package}: pip install 'fastformer[{extra}]'")
    for path in (value for value in vars(data).values() if isinstance(value, Path)):
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")


def check_resumable(folder: Path, model: Any) -> None:
    """Check the metrics files, and a model's settings against the last checkpoint, before the model is built."""
    with suppress(FileNotFoundError):
        read_metrics(folder)
    last = CheckpointFolder(folder / "checkpoints").last()
    try:
        checkpoint = None if last is None else Checkpoint.open(last)
    except CheckpointError:  # `Trainer.resume` raises it, and names the previous good checkpoint
        return
    if checkpoint is not None:
        checkpoint.check_architecture(model)
        checkpoint.check_size(model.matrix_numbers)
