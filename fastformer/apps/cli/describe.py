"""What `fastformer info` prints: the system, the backend, and a run folder."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import fastformer
from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.kinds import application_of
from fastformer.apps.train import CheckpointFolder
from fastformer.backend import Backend
from fastformer.functional import explain
from fastformer.functional.choice import INSTALL_TRITON

_ABSENT = "not installed"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return _ABSENT


def _triton() -> str:
    found = [_version(name) for name in ("triton", "triton-windows")]
    version = next((x for x in found if x != _ABSENT), None)
    if version is None:
        return f"Triton: not installed ({INSTALL_TRITON})"
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
    """One line for the ops that are run alike and for the same reason."""
    ops_of: dict[str, list[str]] = {}
    with fastformer.backend(choice):
        for line in explain(torch.empty(0, device=device)).splitlines():
            op, verdict = line.split(": ", 1)
            ops_of.setdefault(verdict.replace(f"({op} ", "("), []).append(op)
    return [f"  {', '.join(ops)}: {verdict}" for verdict, ops in ops_of.items()]


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


def describe_run(folder: Path) -> str:
    """What a run is, its model, and its checkpoints."""
    application = application_of(read_kind(folder))
    described = application.describe(application.model(**application.read_config(folder)["model"]))
    checkpoints = CheckpointFolder(folder / "checkpoints")
    best, last = checkpoints.best(), checkpoints.last()
    return (
        f"{folder}: {application.title} run, {described}\n"
        f"  checkpoints: best {best.name if best else 'none'} (value {checkpoints.best_value()}), "
        f"last {last.name if last else 'none'}"
    )
