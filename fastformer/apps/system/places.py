"""Where a file of a folder is: its name, and the open folder that the name is relative to.

A run folder is passed on, and what is read or written in it must not be a way out of it: every name below the folder
that its user chose is opened relative to the one before, without following a link. A folder that this thread writes to
(`held`) is reached by what was opened when it was locked, not by its name, under which another one may stand by now.
Where the system has no such calls (Windows) each name is looked at first.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_RELATIVE = bool(NOFOLLOW) and {os.open, os.stat, os.unlink, os.rename, os.mkdir, os.rmdir} <= os.supports_dir_fd

# (the name, the folder that it is relative to; None: the name is a path)
Place = tuple[str, int | None]

# The open folders that this thread writes to, by their paths.
_held: ContextVar[Mapping[Path, int]] = ContextVar("held", default=MappingProxyType({}))


class IrregularFileError(OSError):
    """Something else than a file stands where a file is wanted: a link, a pipe, a device; or too large a file."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def held(folder: Path, descriptor: int | None) -> Iterator[None]:
    """For a block of this thread, names below the absolute path `folder` are those below an open folder."""
    token = _held.set(_held.get() if descriptor is None else {**_held.get(), folder: descriptor})
    try:
        yield
    finally:
        _held.reset(token)


@contextmanager
def place_of(path: Path, within: Path | None) -> Iterator[Place]:
    """Where a file is: its name, and its folder, to which no link led.

    Raises:
        IrregularFileError: something on the way is a link or a file, or it leads out of `within` (..).
        OSError: a folder on the way cannot be opened, such as FileNotFoundError.
    """
    if within is None:
        yield str(path), None
        return
    top, descriptor = held_above(within) or (within, None)
    parts, shown = (path if descriptor is None else path.absolute()).relative_to(top).parts, top
    if ".." in parts:
        raise IrregularFileError(errno.EINVAL, "leads out of its folder", str(path))
    if not _RELATIVE:
        for part in parts[:-1]:
            shown /= part
            if shown.is_symlink():
                raise irregular(shown, stat.S_IFLNK)
        yield str(path), None
        return
    with named(within):
        folder = os.open(top, _FOLDER) if descriptor is None else os.dup(descriptor)
    try:
        for part in parts[:-1]:
            shown /= part
            with named(shown):
                mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(mode):
                    raise irregular(shown, mode)
                inner = os.open(part, _FOLDER | NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield (parts[-1] if parts else "."), folder
    finally:
        os.close(folder)


def held_above(path: Path) -> tuple[Path, int] | None:
    """The nearest folder at or above a path that this thread holds."""
    found, whole = _held.get(), path.absolute()
    for above in (whole, *whole.parents) if found else ():
        if above in found and ".." not in whole.relative_to(above).parts:
            return above, found[above]
    return None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors name the whole path."""
    try:
        yield
    except IrregularFileError:
        raise
    except OSError as error:
        error.filename = str(path)
        raise


def irregular(path: Path, mode: int) -> OSError:
    """What to raise where a file or a folder was wanted, by the mode of what is there."""
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, "is a folder, not a file", str(path))
    if stat.S_ISREG(mode):
        return NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(path))
    what = (
        "a link, which is not followed here" if stat.S_ISLNK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
    )
    return IrregularFileError(errno.EINVAL, f"is {what}, not a file", str(path))
