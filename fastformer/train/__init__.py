"""Training: one loop for every model, schedules, checkpoints, metrics and configuration files."""

from fastformer.train.batch_source import Batch, BatchSource
from fastformer.train.checkpoint_files import Checkpoint, average_checkpoints
from fastformer.train.checkpoints import CheckpointFolder, find_checkpoint
from fastformer.train.config import TrainConfig, load_toml, save_toml
from fastformer.train.metrics import MetricsLog, read_metrics
from fastformer.train.processes import ProcessError, Processes, join_processes
from fastformer.train.randomness import seed_everything
from fastformer.train.schedules import Schedule
from fastformer.train.trainer import DivergedError, Result, Trainer
from fastformer.train.weights import CheckpointError, put_weights, read_weights, write_weights

__all__ = [
    "Batch",
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
    "average_checkpoints",
    "find_checkpoint",
    "join_processes",
    "load_toml",
    "put_weights",
    "read_metrics",
    "read_weights",
    "save_toml",
    "seed_everything",
    "write_weights",
]
