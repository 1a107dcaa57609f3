"""Which names in a run folder are a run's own: a new run takes no folder with others, and no output replaces one.

A folder is a run's if all in it bears such names and says that a run made it, since others have a config.toml, too: the
settings with the kind of run beside its data's fingerprint, which are written together, or the lock of a run that was
killed before.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from fastformer.apps.system.foreign_files import check_path, read_file, same_file
from fastformer.apps.system.run_lock import LOCK
from fastformer.apps.train.checkpoint_folder import INDEX, OURS

CONFIG, DATA = "config.toml", "data.json"
_METRICS = ("metrics.jsonl", "metrics.csv")
PICTURES = ("history.png", "attention.png")  # drawn anew from the others
_TOKENIZER = ("tokenizer.json", "sentencepiece.model", "vocabulary.json")
# What is left of one that was being drawn by `plot … --output` when it was killed.
_DRAWN = re.compile(rf"\.({'|'.join(map(re.escape, PICTURES))})\.[a-z0-9_]{{8}}\.tmp")
DEMO = "demo.txt"
_FILES = (CONFIG, DATA, *_METRICS, *PICTURES, DEMO)
_FOLDERS = {
    "tokenizer": re.compile("|".join(("source|target", *(rf"\.?{re.escape(name)}" for name in _TOKENIZER)))),
    "checkpoints": re.compile(rf"\.?{re.escape(INDEX)}|{OURS.pattern}"),
    "tensorboard": re.compile(r"events\.out\.tfevents\..*"),
}
_BEGUN = {
    LOCK,
    DEMO,
    f".{DEMO}",
    DATA,
    f".{DATA}",
    f".{CONFIG}",
    "tokenizer",
}  # what a run has that is killed before its settings
_DEPTH = 4  # of a run's files: checkpoints/step-1/shards/…
_KIND = re.compile(rb"^\[run\]\s+kind = ", re.MULTILINE)
_OWN = {*_FILES, *(f".{name}" for name in _FILES), *_FOLDERS, LOCK}


def refuse_foreign(folder: Path, marked: bool = False) -> None:
    """Refuse a folder that is neither new, nor empty, nor a run's; nothing is written.

    Args:
        folder: of a run that is to be.
        marked: a file of the caller's says that it may be replaced, so that some of a run's files may be missing.

    Raises:
        FileExistsError: naming the first entry that is no run's.
        fastformer.apps.system.places.IrregularFileError: an entry with a run's name is a link, a pipe or a
            device.
    """
    if not folder.exists():
        return
    there = {path.name for path in folder.iterdir()}
    for path in (entry.relative_to(folder) for entry in _entries(folder)):
        if not _is_own(path):
            raise FileExistsError(
                f"{folder} is no run folder: {path} is not a run's; choose an empty folder or a new one"
            )
    refuse_links(folder)
    if there and not _is_run(folder, there, marked):
        raise FileExistsError(f"{folder} is no run folder, and holds {min(there)}; choose an empty folder or a new one")


def _is_run(folder: Path, there: set[str], marked: bool) -> bool:
    if DATA in there and b'"fingerprint"' not in read_file(folder / DATA, folder):
        return False
    if CONFIG in there:
        return (marked or DATA in there) and _KIND.search(read_file(folder / CONFIG, folder)) is not None
    if marked:
        return True
    said = read_file(folder / LOCK, folder) if LOCK in there else b""
    return there <= _BEGUN and (said.startswith(b"process ") or there <= {LOCK, DEMO})


def refuse_links(folder: Path) -> None:
    """Refuse what has a run's name and is something else: a link, a pipe, a device, a folder for a file or the reverse.

    Raises:
        fastformer.apps.system.places.IrregularFileError, IsADirectoryError, NotADirectoryError: naming it.
    """
    for path in _entries(folder):
        if _is_own(path.relative_to(folder)):
            # A hidden file with the name of a save is stepped around; of the other names, only files have a suffix.
            hidden = path.name.startswith(".") and OURS.fullmatch(path.name)
            check_path(path, folder, None if hidden else not path.suffix and path.name != LOCK)


def _entries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        yield path
        if path.name in _FOLDERS and path.is_dir() and not path.is_symlink():
            yield from sorted(path.iterdir())


def _is_own(path: Path) -> bool:
    first, *rest = path.parts
    return (
        first in _OWN or _DRAWN.fullmatch(first) is not None if not rest else bool(_FOLDERS[first].fullmatch(rest[0]))
    )


def refuse_output(output: Path | None, *inputs: Path | None, runs: tuple[Path, ...] = ()) -> None:
    """Refuse to write onto what is read, through links too.

    Args:
        output: where to write; None: nowhere.
        inputs: files that are read.
        runs: run folders that are read: their own files, pictures apart, and what would stand among these.

    Raises:
        ValueError: naming what the output would replace.
    """
    if output is None:
        return
    for path in inputs:
        if path is not None and same_file(output, path):
            raise ValueError(f"{output} is also read ({path}), and would be replaced; choose another file to write")
    target = Path(os.path.realpath(output))
    for run in runs:
        base = Path(os.path.realpath(run))
        within = target.is_relative_to(base) and target != base
        first = target.relative_to(base).parts[0] if within else ""
        own = first in _OWN and first not in PICTURES
        if own or any(same_file(output, path) for path in _own_files(run)):
            raise ValueError(
                f"{output} is a file of the run {run}, and would be replaced; choose another file to write"
            )


def _own_files(run: Path) -> Iterator[Path]:
    """The files below a run's own names, pictures apart; what else stands there, such as a whole disk, is not read."""
    found = [run / name for name in sorted(_OWN)]
    for _ in range(_DEPTH):
        yield from (path for path in found if path.name not in PICTURES and path.is_file())
        folders = [path for path in found if path.is_dir() and not path.is_symlink()]
        found = [
            Path(path) for folder in folders if os.access(folder, os.R_OK | os.X_OK) for path in os.scandir(folder)
        ]
