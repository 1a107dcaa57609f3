"""Read the kind of a run folder, and check which folders and outputs a command may write to.

A run folder describes itself, so that its path suffices to resume, evaluate or use the run:

    config.toml      [run] the kind, [data] [model] [train]: every setting, defaults and chosen ones included
    data.json        counts and fingerprints of the data; a resumed run, and evaluate, must find equal ones
    tokenizer/       one tokenizer, or one in a folder for each side
    checkpoints/     weights as safetensors, resumable state
    metrics.jsonl    losses, speed, validation scores; metrics.csv the same
"""

import os
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path

from fastformer.apps.runs.kinds import KINDS, MAIN
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.settings import Settings, setting
from fastformer.apps.system.run_lock import LOCK
from fastformer.apps.train import CheckpointFolder

CONFIG, DATA = "config.toml", "data.json"
FILES = (CONFIG, DATA, "metrics.jsonl", "metrics.csv", "tokenizer", "checkpoints", "tensorboard", LOCK)


class RunConfig(Settings):
    """The [run] section. Folders without it are of the main application."""

    kind: str = setting(MISSING, "what the model does", choices=KINDS)
    origin: str | None = setting(None, "folder of the model that the run began with")


def read_kind(folder: Path | str) -> str:
    """Return the kind of a run folder; raises FileNotFoundError without a run, ValueError for a damaged config.toml."""
    return stated(config_of(folder)).kind


def config_of(folder: Path | str) -> Path:
    """Return the config.toml of a run folder; raises FileNotFoundError if the folder holds no run."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no config.toml")
    return path


def stated(path: Path, default: str = MAIN) -> RunConfig:
    """Return the [run] section of a file; `default` is the kind of a file without one."""
    run = read_toml(path).get("run", {})
    run = run if isinstance(run, dict) else {}
    return RunConfig(run.get("kind", default), run.get("origin"))


def check_new(folder: Path, kind: str) -> None:
    """Raise an OSError for a folder that is neither new, nor empty, nor a run of this kind without a checkpoint."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file; a run needs a folder")
    if not os.access(existing, os.W_OK):
        raise PermissionError(f"{existing} cannot be written to")
    names = set(os.listdir(folder)) - {LOCK} if folder.exists() else set()
    if not names:
        return
    if CheckpointFolder(folder / "checkpoints").paths():
        raise FileExistsError(f"{folder} holds a run already; resume it, or choose another folder")
    if not {CONFIG, DATA} <= names or "run" not in read_toml(folder / CONFIG):
        raise FileExistsError(f"{folder} is no run folder, and holds {min(names)}; choose an empty folder or a new one")
    if (existing_kind := read_kind(folder)) != kind:
        raise FileExistsError(f"{folder} holds a {existing_kind} run; choose another folder")


def refuse_output(output: Path | None, *inputs: Path | None, runs: tuple[Path, ...] = ()) -> None:
    """Raise ValueError for an output that would replace an input, or a file of a run that is read.

    output, inputs: None for standard streams. runs: run folders that are read; only their pictures may be replaced.
    """
    if output is None:
        return
    for path in inputs:
        with suppress(OSError):
            if path is not None and os.path.samefile(output, path):
                raise ValueError(f"{output} is also read ({path}), and would be replaced; choose another file to write")
    for run in runs:
        if any(Path(os.path.realpath(output)).is_relative_to(os.path.realpath(run / name)) for name in FILES):
            raise ValueError(
                f"{output} is a file of the run {run}, and would be replaced; choose another file to write"
            )
