"""The folder of an exported model: made whole or not at all, with the tokenizers in it."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastformer.apps.runs.application import Application
from fastformer.apps.runs.kinds import applications
from fastformer.apps.system.atomic import MOUNTED, hidden_folder, hidden_folders, naming
from fastformer.apps.system.foreign_folders import remove
from fastformer.apps.text import Tokenizer
from fastformer.apps.train.checkpoint import synchronise

logger = logging.getLogger("fastformer")


@contextmanager
def new_folder(folder: Path | str) -> Iterator[Path]:
    """Write beside, then rename: after a failure there is no half folder.

    A folder that is a mount (a container's volume) cannot be renamed to: files written in a hidden folder of it get
    their names one after another.

    Raises:
        FileExistsError: the folder exists and is not empty, or is the current one.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    if folder == Path.cwd():
        raise FileExistsError(f"{folder} is the folder that you are in, and would be replaced; choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in hidden_folders(folder):
        logger.warning("%s is of an export that was killed, unless one is running; nothing reads it", left)
    temporary = hidden_folder(folder / folder.name if os.path.ismount(folder) else folder)
    try:
        with naming(folder):
            yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            synchronise(path)
        _give_name(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _give_name(temporary: Path, folder: Path) -> None:
    """Rename it, or, to a mount, move what is in it."""
    if temporary.parent != folder:
        if os.name == "nt" and folder.exists():  # elsewhere a folder replaces an empty one
            folder.rmdir()
        try:
            temporary.replace(folder)
            return
        except OSError as error:
            if error.errno not in MOUNTED:  # one of the same file system is not known to be a mount before
                raise
    moved: list[Path] = []
    try:
        for path in sorted(temporary.iterdir()):
            if os.path.lexists(folder / path.name):
                raise FileExistsError(f"{folder / path.name} has come meanwhile; choose another folder")
            moved.append(folder / path.name)
            shutil.move(path, moved[-1])
            synchronise(moved[-1])
        synchronise(folder)
        temporary.rmdir()
    except BaseException:
        for path in moved:
            with suppress(OSError):
                remove(path, folder)
        raise


def application_for(model: Any, tokenizers: Sequence[Tokenizer]) -> Application:
    """The application whose model it is.

    Raises:
        TypeError: it is of none.
        ValueError: there are not as many tokenizers as such a model has sides.
    """
    found = next((each for each in applications() if isinstance(model, each.network)), None)
    if found is None:
        names = ", ".join(each.network.__name__ for each in applications())
        raise TypeError(f"model must be one of {names}, not a {type(model).__name__}")
    wanted = len(found.tokenizers)
    if len(tokenizers) != wanted:
        raise ValueError(f"tokenizers must be {wanted} for a {type(model).__name__}, not {len(tokenizers)}")
    return found
