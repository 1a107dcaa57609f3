"""Write files and folders atomically.

A file is written under a temporary name in its folder, flushed to the disk, and renamed: after a crash or on a full
disk the old content still exists.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import IO

logger = logging.getLogger("fastformer")

# Names of open files, such as /dev/stdout, to which other processes write, too.
_OPEN_FILES = ("/dev/fd/", "/dev/stdout", "/dev/stderr", "/proc/")


@contextmanager
def add_path_to_errors(path: str | Path) -> Iterator[None]:
    """Name `path` in an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def is_stream(path: Path) -> bool:
    """Return whether `path` is a device, a pipe or an open file such as /dev/stdout, which cannot be replaced."""
    is_open = str(path.absolute()).startswith(_OPEN_FILES)
    return is_open or (path.exists() and not path.is_file() and not path.is_dir())


def check_writable(path: Path) -> None:
    """Raise PermissionError for a file that this user may not write, because a rename would replace it."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def write_file(path: str | Path, data: bytes) -> None:
    """Replace a file atomically; see `replacing`."""
    with replacing(Path(path)) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, partial: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file that atomically replaces `path` when the block ends. Devices, pipes and open files are appended to.

    Args:
        path: of the file. If it is a symbolic link, the link stays and the target is replaced.
        partial: the temporary file is called NAME.partial, is not buffered, and is kept with a warning if the block
            raises. Otherwise it is hidden, and removed if the block raises.
    """
    buffering = 0 if partial else -1
    if is_stream(path):
        with add_path_to_errors(path), path.open("ab", buffering) as file:
            yield file
        return
    check_writable(path)
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    if partial:  # NAME.partial, or NAME.2.partial if that exists, and so on
        names = (f"{path.name}{number}.partial" for number in chain([""], (f".{each}" for each in count(2))))
        temporary = next(each for each in map(path.with_name, names) if not each.exists())
    try:
        with add_path_to_errors(path), temporary.open("wb", buffering) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        with suppress(OSError):
            if partial and temporary.stat().st_size:
                logger.warning("%s holds what was finished", temporary)
            else:
                temporary.unlink()
        raise


def append_file(path: Path, data: bytes) -> None:
    """Append to a file, which is created if it does not exist."""
    with add_path_to_errors(path), path.open("ab") as file:
        file.write(data)


def synchronise(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Windows cannot do that for folders."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        with add_path_to_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that is renamed to `folder`, new or empty, when the block ends; removed if it raises.

    Raises FileExistsError for a folder with files, and for the current one, in which the user's shell would be left.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; choose another folder")
    if folder.resolve() == Path.cwd():
        raise FileExistsError(f"{folder} is the folder that you are in, and would be replaced; choose another")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    temporary.mkdir(parents=True)
    try:
        with add_path_to_errors(folder):
            yield temporary
        for path in (*temporary.rglob("*"), temporary):
            synchronise(path)
        temporary.replace(folder)
        synchronise(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
