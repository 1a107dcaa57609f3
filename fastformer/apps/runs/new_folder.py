"""The folder of a new run: what it may hold before, and what is left of it where making the run fails."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastformer.apps.runs.folder import read_kind
from fastformer.apps.runs.own_files import refuse_foreign
from fastformer.apps.system.foreign_folders import names_in, remove
from fastformer.apps.system.run_lock import LOCK
from fastformer.apps.train import CheckpointFolder


def check_new(folder: Path, kind: str) -> None:
    """Refuse a folder that a new run of this kind cannot have."""
    if (folder / "checkpoints").is_dir() and CheckpointFolder(folder / "checkpoints").paths():
        raise FileExistsError(f"{folder} holds a run already; resume it, or choose another folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file; a run needs a folder")
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{there} cannot be written to")
    refuse_foreign(folder)
    if (folder / "config.toml").exists() and (found := read_kind(folder)) != kind:
        raise FileExistsError(f"{folder} holds a {found} run; choose another folder")


@contextmanager
def whole_or_empty(folder: Path) -> Iterator[None]:
    """Where the block fails, an empty folder is empty again: half of a run would be taken for somebody's files."""
    empty = all(name == LOCK for name in names_in(folder))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for name in names_in(folder) if empty else ():
                if name != LOCK:
                    remove(folder / name, folder)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder for the block, with those above it; where it fails, what is empty of them goes again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in missing:
                path.rmdir()
        raise
