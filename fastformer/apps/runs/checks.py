"""Refuse what could only fail late, before any data is read and before a folder is made."""

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
from fastformer.apps.train.compilation import check_compiler
from fastformer.apps.train.config import check_threads


def check_settings(
    application: Application,
    computed: tuple[str, ...],
    data: Any,
    model: Mapping[str, Any],
    train: TrainConfig,
    device: torch.device | str,
) -> None:
    """Refuse a metric that is not computed, a backend that cannot run here, a model whose heads do not fit.

    Args:
        application: of the run.
        computed: the metrics that validation computes.
        data, train: settings.
        model: settings of the model, without those that follow from the tokenizers.
        device: of the model.

    Raises:
        ValueError: naming the setting, what it was, and what is allowed.
        FileNotFoundError: a file of the data is not there.
        ImportError: a package that will be needed is not installed.
        fastformer.backend.BackendError: the backend that was asked for cannot run here.
    """
    config = application.planned(model, data)
    check_memory(config)
    check_threads(train.threads)
    try:
        x = torch.empty(1, 1, 1, config.d_model // config.heads, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # the latter without CUDA
        raise ValueError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    if x.is_meta:
        raise ValueError(f"device={str(device)!r} cannot be used: nothing is computed there")
    functional.check_backend(x)
    check_compiler(train.compile, device)
    known = application.metrics
    if train.metric not in known:
        raise ValueError(f"metric={train.metric!r} is no value of this validation; choose {', '.join(known)}")
    if train.metric not in computed:
        raise ValueError(f"metric={train.metric!r} is not computed here; it needs {known[train.metric]}")
    world = Processes.current().world
    if train.cuda_graphs and world > 1:
        raise ValueError(f"cuda_graphs=True is for one process, not for {world}")
    for package, wanted in (("sacrebleu", "bleu" in computed), ("tensorboard", train.tensorboard)):
        if wanted and importlib.util.find_spec(package) is None:
            extra = "tensorboard" if package == "tensorboard" else "apps"
            raise ImportError(f"this run needs {package}: pip install 'fastformer[{extra}]'")
    for path in (value for value in vars(data).values() if isinstance(value, Path)):
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")


def check_resumable(folder: Path, model: Any) -> None:
    """Read the metrics, and compare a model's settings with the last checkpoint, before the model is built."""
    with suppress(FileNotFoundError):
        read_metrics(folder)
    last = CheckpointFolder(folder / "checkpoints").last()
    try:
        found = None if last is None else Checkpoint.open(last)
    except CheckpointError:  # `Trainer.resume` names the previous good one, too
        return
    if found is not None:
        found.check_architecture(model)
        found.check_size(model.matrix_numbers)
