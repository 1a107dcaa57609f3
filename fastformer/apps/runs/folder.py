"""Run folders: their kinds, their TOML file of settings, and the folders and outputs that a command may write to.

A run folder describes itself, so that its path suffices to resume, evaluate or use the run:

    config.toml      [run] the kind, [data] [model] [train]: every setting, defaults and chosen ones included
    data.json        counts and fingerprints of the data; a resumed run must find equal ones
    tokenizer/       one tokenizer, or one in a folder for each side
    checkpoints/     weights as safetensors, resumable state
    metrics.jsonl    losses, speed, validation scores; metrics.csv the same
"""

import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastformer.apps.settings import Settings, helps, setting, suggestion, to_plain
from fastformer.apps.system.files import write_file
from fastformer.apps.system.run_lock import LOCK
from fastformer.apps.train import CheckpointFolder

CONFIG, DATA = "config.toml", "data.json"
FILES = (CONFIG, DATA, "metrics.jsonl", "metrics.csv", "tokenizer", "checkpoints", "tensorboard", LOCK)
KINDS = ("translation", "language", "classification")  # folders of `apps`, each with `run.py` and `commands.py`
MAIN = KINDS[0]  # kind of a config.toml without one, and of commands without --run


class RunConfig(Settings):
    """The [run] section."""

    kind: str = setting(MAIN, "what the model does", choices=KINDS)
    origin: str | None = setting(None, "folder of the model that the run began with")


def read_run_section(path: Path, default: str = MAIN) -> RunConfig:
    """Return the [run] section of a file; `default` is the kind of a file without one."""
    run = read_toml(path).get("run", {})
    return RunConfig(run.get("kind", default), run.get("origin")) if isinstance(run, dict) else RunConfig(default)


def config_of(folder: Path | str) -> Path:
    """Return the config.toml of a run folder; raises FileNotFoundError if the folder holds no run."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        if not path.parent.exists():
            raise FileNotFoundError(f"there is no folder {folder}")
        exported = "; it holds an exported model, which --from takes" if read_export(folder) is not None else ""
        raise FileNotFoundError(f"{folder} is not a run folder: it has no config.toml{exported}")
    return path


def is_config_of_run(path: Path) -> bool:
    """Return whether a file of settings is that of a run, which states all settings, used and unused."""
    return path.name == CONFIG and (path.parent / "checkpoints").is_dir()


def read_export(folder: Path | str) -> dict[str, Any] | None:
    """Return the config.json of a model exported as safetensors, with its kind and settings of data; else None."""
    try:
        content = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(content, dict) and "kind" in content and isinstance(content.get("data", {}), dict)
    return content if known else None


def read_kind(folder: Path | str) -> str:
    """Return the kind of a run folder; raises FileNotFoundError without a run, ValueError for a damaged config.toml."""
    return read_run_section(config_of(folder)).kind


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raises FileNotFoundError, or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such configuration file")
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # tomllib also raises errors other than TOMLDecodeError
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def load_toml(path: Path | str, sections: Mapping[str, type[Settings]]) -> dict[str, dict[str, Any]]:
    """Return the settings that a TOML file states, {section: {key: value}}, with every section present.

    Raises FileNotFoundError, or ValueError naming a section or key that is unknown; values are checked where the
    settings are constructed.
    """
    path = Path(path)
    result: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for section, values in read_toml(path).items():
        if section not in sections:
            raise ValueError(f"{path}: unknown section [{section}]{suggestion(section, dict.fromkeys(sections, ''))}")
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {section} must be a section [{section}], not a value")
        known = helps(sections[section])
        if unknown := next((key for key in values if key not in known), None):
            raise ValueError(f"{path}: unknown key {unknown!r} in [{section}]{suggestion(unknown, known)}")
        result[section] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return result


def save_toml(path: Path | str, sections: Mapping[str, Any]) -> None:
    """Write {section: settings or mapping} as TOML for `load_toml`, atomically; None is left out."""
    import tomli_w

    plain = {section: to_plain(values).items() for section, values in sections.items()}
    content = {section: {key: value for key, value in items if value is not None} for section, items in plain.items()}
    write_file(path, tomli_w.dumps(content).encode("utf-8"))


def check_new(folder: Path, kind: str) -> None:
    """Raise an OSError for a folder that is neither new, nor empty, nor a run of this kind without a checkpoint."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file; a run needs a folder")
    if not os.access(existing, os.W_OK):
        raise PermissionError(f"{existing} cannot be written to")
    names = set(os.listdir(folder)) if folder.exists() else set()
    of_killed = {LOCK, DATA, *(f".{name}.tmp" for name in (DATA, CONFIG))}  # before it had a config.toml
    if not names or (LOCK in names and names <= of_killed):
        return
    if CheckpointFolder(folder / "checkpoints").paths():
        raise FileExistsError(f"{folder} holds a run already; resume it, or choose another folder")
    if not {CONFIG, DATA} <= names or "run" not in read_toml(folder / CONFIG):
        content = min(names - {LOCK})
        raise FileExistsError(f"{folder} is no run folder, and holds {content}; choose an empty folder or a new one")
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
