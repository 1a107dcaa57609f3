"""Training: one loop for every model, schedules, checkpoints, metrics and configuration files."""

from fastformer.apps.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    average_checkpoints,
    put_weights,
    read_weights,
    write_weights,
)
from fastformer.apps.train.checkpoint_folder import CheckpointFolder, find_checkpoint
from fastformer.apps.train.config import TrainConfig
from fastformer.apps.train.metrics import MetricsLog, read_metrics
from fastformer.apps.train.processes import ProcessError, Processes, join_processes
from fastformer.apps.train.randomness import seed_everything
from fastformer.apps.train.run_state import BatchSource, DivergedError, Result
from fastformer.apps.train.schedules import Schedule
from fastformer.apps.train.trainer import Trainer
from fastformer.apps.train.validation import Validation

__all__ = [
    "BatchSource",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFolder",
    "DivergedError",
    "MetricsLog",
    "ProcessError",
    "Processes",
    "Result",
    "Schedule",
    "TrainConfig",
    "Trainer",
    "Validation",
    "average_checkpoints",
    "find_checkpoint",
    "join_processes",
    "put_weights",
    "read_metrics",
    "read_weights",
    "seed_everything",
    "write_weights",
]
