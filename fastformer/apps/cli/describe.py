"""What `fastformer info` prints: the system, the backend, and a run folder."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import fastformer
from fastformer.apps.language.model import LanguageConfig, LanguageModel
from fastformer.apps.language.run import LANGUAGE
from fastformer.apps.runs.folder import KINDS, read_kind
from fastformer.apps.train import CheckpointFolder
from fastformer.apps.translation.model import TranslationConfig, TranslationModel
from fastformer.apps.translation.run import TRANSLATION
from fastformer.backend import Backend
from fastformer.functional import explain

_ABSENT = "not installed"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _ABSENT


def model_size(model: torch.nn.Module) -> str:
    """Count distinct parameters, and their bytes."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{count:,} parameters, {size / 2**20:.1f} MiB"


def _triton() -> str:
    found = [_version(name) for name in ("triton", "triton-windows")]
    version = next((x for x in found if x != _ABSENT), None)
    if version is None:
        return "Triton: not installed (pip install 'fastformer[triton]')"
    interpreter = os.environ.get("TRITON_INTERPRET")
    return f"Triton: {version}" + (f", TRITON_INTERPRET={interpreter}" if interpreter else "")


def _gpus() -> list[str]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        f"GPU {i}: {x.name}, compute capability {x.major}.{x.minor}, {x.multi_processor_count} multiprocessors, "
        f"{x.total_memory / 2**30:.0f} GiB"
        for i, x in enumerate(properties)
    ] or ["GPU: none"]


def _ops(choice: Backend, device: str) -> list[str]:
    with fastformer.backend(choice):
        return [f"  {line}" for line in explain(torch.empty(0, device=device)).splitlines()]


def describe_system() -> str:
    """Versions and devices, the backend in force, and what runs each op under it and under `auto`, and why."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = fastformer.get_backend()
    others = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "sentencepiece"))
    lines = [
        f"fastformer {fastformer.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {others}",
        _triton(),
        f"CPU threads: {torch.get_num_threads()}",
        *_gpus(),
        f"backend: {choice} (environment variable FASTFORMER_BACKEND=auto|triton|reference)",
    ]
    if choice != "auto":
        lines += [f"with it, a float32 tensor on {device} takes", *_ops(choice, device)]
    return "\n".join([*lines, f"with backend auto, a float32 tensor on {device} takes", *_ops("auto", device)])


def describe_translation(config: TranslationConfig) -> str:
    """Parameters and shape of a translation model."""
    with torch.device("meta"):
        model = TranslationModel(config)
    return (
        f"{model_size(model)}: {config.encoder_layers}+{config.decoder_layers} layers, d_model {config.d_model}, "
        f"heads {config.heads}, feed_forward {config.feed_forward}, vocabularies {config.source_vocabulary} and "
        f"{config.target_vocabulary}, embeddings {config.embeddings}"
    )


def describe_language(config: LanguageConfig) -> str:
    """Parameters and shape of a language model."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return (
        f"{model_size(model)}: {config.layers} layers, d_model {config.d_model}, heads {config.heads}, feed_forward "
        f"{config.feed_forward}, vocabulary {config.vocabulary}, embeddings {config.embeddings}"
    )


def describe_run(folder: Path) -> str:
    """What a run is, its model, and its checkpoints."""
    kind = read_kind(folder)
    if kind == "language":
        described = describe_language(LanguageConfig(**LANGUAGE.read_config(folder)["model"]))
    else:
        described = describe_translation(TranslationConfig(**TRANSLATION.read_config(folder)["model"]))
    checkpoints = CheckpointFolder(folder / "checkpoints")
    best, last = checkpoints.best(), checkpoints.last()
    return (
        f"{folder}: {KINDS[kind][0]} run, {described}\n"
        f"  checkpoints: best {best.name if best else 'none'} (value {checkpoints.best_value()}), "
        f"last {last.name if last else 'none'}"
    )
