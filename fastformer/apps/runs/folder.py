"""What a run folder is, and what it says that it is.

A run folder describes itself, so that nothing but its path is needed to resume, evaluate or use it:

    config.toml      [run] its kind, [data] [model] [train]: every setting, defaults and chosen ones included
    data.json        what was read: counts, settings and fingerprints that a resumed run, and evaluate, must meet again
    tokenizer/       one tokenizer, or one in a folder for each side
    checkpoints/     weights as safetensors, resumable state
    metrics.jsonl    losses, speed, validation scores; metrics.csv the same
"""

from dataclasses import MISSING
from pathlib import Path

from fastformer.apps.runs.kinds import kinds, main_application
from fastformer.apps.runs.toml import read_toml
from fastformer.apps.settings import Settings, Texts, setting
from fastformer.apps.system.foreign_files import check_path

BY_HAND = "by hand"  # the dataset of a run that was trained in Python, whose folder does not know its text

# 2: train_size of translation counts for all kinds of data; before, config.toml held an idle one.
VERSION = 2


class RunConfig(Settings):
    """What a run is. Folders written before there was a choice say nothing: the main application's, in version 1."""

    kind: str = setting(MISSING, "what the model does", choices=kinds())
    version: int = setting(1, "which meaning its settings have", at_least=1, at_most=VERSION)
    chosen: Texts | None = setting(None, "settings that no user gave: they were chosen for corpus and budget")


def read_kind(folder: Path | str) -> str:
    """What a run folder holds: one of `kinds()`.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: its config.toml is damaged.
    """
    return stated(config_of(folder)).kind


def config_of(folder: Path | str) -> Path:
    """The config.toml of a run folder, which is no link; raises FileNotFoundError where the folder holds no run."""
    path = Path(folder) / "config.toml"
    if not check_path(path, path.parent):
        raise FileNotFoundError(f"{folder} is not a run folder: it has no config.toml")
    return path


def stated(path: Path, default: str | None = None) -> RunConfig:
    """What a file says that it is; where it does not, the default, or else the main application's."""
    run = read_toml(path).get("run", {})
    run = run if isinstance(run, dict) else {}
    kind = run["kind"] if "kind" in run else default or main_application().kind
    return RunConfig(kind, run.get("version", 1), run.get("chosen"))


def refuse_by_hand(dataset: str | None) -> None:
    """Raise ValueError where a run's data is wanted and its folder does not know it."""
    if dataset == BY_HAND:
        raise ValueError(
            "the run was trained in Python, and its folder does not know the data: go on there, and give evaluate its "
            "files with --source"
        )
