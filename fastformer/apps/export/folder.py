"""The folder of an exported model: made whole or not at all, with the tokenizers in it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastformer.apps.runs.application import Application
from fastformer.apps.runs.kinds import applications
from fastformer.apps.system.files import new_folder
from fastformer.apps.text import Tokenizer


@contextmanager
def export_folder(folder: Path | str) -> Iterator[Path]:
    """Yield a hidden folder to write to, which gets its name when the block ends; see `files.new_folder`.

    Raises:
        FileExistsError: the folder exists and is not empty, or is the current one.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    if folder == Path.cwd():
        raise FileExistsError(f"{folder} is the folder that you are in, and would be replaced; choose another")
    with new_folder(folder) as temporary:
        yield temporary


def application_for(model: Any, tokenizers: Sequence[Tokenizer]) -> Application:
    """The application whose model it is.

    Raises:
        TypeError: it is of none.
        ValueError: there are not as many tokenizers as such a model has sides.
    """
    found: Application | None = next((each for each in applications() if isinstance(model, each.network)), None)
    if found is None:
        names = ", ".join(each.network.__name__ for each in applications())
        raise TypeError(f"model must be one of {names}, not a {type(model).__name__}")
    wanted = len(found.tokenizers)
    if len(tokenizers) != wanted:
        raise ValueError(f"tokenizers must be {wanted} for a {type(model).__name__}, not {len(tokenizers)}")
    return found
