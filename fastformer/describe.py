"""What `fastformer info` prints: the system, the backend, and a run folder."""

import platform
from importlib import metadata
from pathlib import Path

import torch

import fastformer
from fastformer.functional import explain
from fastformer.models import TranslationConfig, TranslationModel
from fastformer.train import CheckpointFolder
from fastformer.translation import read_config


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def model_size(model: torch.nn.Module) -> str:
    """Count distinct parameters, and their bytes."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{count:,} parameters, {size / 2**20:.1f} MiB"


def describe_system() -> str:
    """Versions, devices, and which implementation of each op would run here, and why."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    device = "cuda" if gpus else "cpu"
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "numpy", "sentencepiece"))
    return "\n".join(
        [
            f"fastformer {fastformer.__version__}, Python {platform.python_version()}, {versions}",
            f"CPU threads: {torch.get_num_threads()}; GPUs: {', '.join(gpus) or 'none'}",
            f"backend: {fastformer.get_backend()} (environment variable FASTFORMER_BACKEND=auto|triton|reference)",
            *(f"  {line}" for line in explain(torch.empty(0, device=device)).splitlines()),
        ]
    )


def describe_model(config: TranslationConfig) -> str:
    """Parameters and shape of a model."""
    with torch.device("meta"):
        model = TranslationModel(config)
    return (
        f"{model_size(model)}: {config.encoder_layers}+{config.decoder_layers} layers, d_model {config.d_model}, "
        f"heads {config.heads}, feed_forward {config.feed_forward}, vocabularies {config.source_vocabulary} and "
        f"{config.target_vocabulary}, embeddings {config.embeddings}"
    )


def describe_run(folder: Path) -> str:
    """The model of a run, and its checkpoints."""
    config = TranslationConfig(**read_config(folder)["model"])
    checkpoints = CheckpointFolder(folder / "checkpoints")
    best, last = checkpoints.best(), checkpoints.last()
    return (
        f"{folder}: {describe_model(config)}\n"
        f"  checkpoints: best {best.name if best else 'none'} (value {checkpoints.best_value()}), "
        f"last {last.name if last else 'none'}"
    )
