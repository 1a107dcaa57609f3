"""Where a file of a folder is: its name, and the open folder that the name is relative to.

A run folder is passed on, and what is read or written in it must not be a way out of it: every name below the folder
that its user chose is opened relative to the one before, without following a link. A folder that this thread writes to
(`held`) is reached by what was opened when it was locked, not by its name, under which another one may stand by now.
A block may be left in another order than it was entered, or be outlived by a task that began in it: a folder that was
closed is reached by its name again, never by a number that the system has given to another file since.
Where the system has no such calls (Windows) each name is looked at first.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_RELATIVE = bool(NOFOLLOW) and {os.open, os.stat, os.unlink, os.rename, os.mkdir, os.rmdir} <= os.supports_dir_fd

# (the name, the folder that it is relative to; None: the name is a path)
Place = tuple[str, int | None]


@dataclass(eq=False)
class OpenFolder:
    """A folder by what was opened. `descriptor`: None where the system opens none; `identity`: see `identity_of`."""

    identity: tuple[int, int]
    descriptor: int | None
    closed: bool = False

    @classmethod
    def at(cls, path: Path) -> "OpenFolder":
        """What a path is now; errors as `os.open` has them."""
        descriptor = os.open(path, _FOLDER) if _RELATIVE else None
        return cls(identity_of(os.stat(path) if descriptor is None else os.fstat(descriptor)), descriptor)

    def close(self) -> None:
        """Close it, for whoever still knows it too, unless somebody has closed all numbers."""
        self.closed, descriptor, self.descriptor = True, self.descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)

    def opened_again(self) -> int | None:
        """A descriptor of the caller's own; None where this one is closed, even by somebody who closes all numbers."""
        if self.descriptor is None:
            return None
        try:
            found = os.dup(self.descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                return None
            raise
        if identity_of(os.fstat(found)) == self.identity:
            return found
        os.close(found)
        return None


# The folders that this thread writes to, with the absolute paths that blocks began with; inner blocks are last.
_held: ContextVar[tuple[tuple[Path, OpenFolder], ...]] = ContextVar("held", default=())


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """What a file or a folder keeps, whatever it is named."""
    return status.st_dev, status.st_ino


class IrregularFileError(OSError):
    """Something else than a file stands where a file is wanted: a link, a pipe, a device; or too large a file."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def held(path: Path, folder: OpenFolder) -> Iterator[None]:
    """For a block of this thread, names below the absolute path are those below an open folder."""
    block = (path, folder)
    _held.set((*_held.get(), block))
    try:
        yield
    finally:
        left = list(_held.get())
        if block in left:  # else it is left in another thread than it was entered in
            left.remove(block)
        _held.set(tuple(left))


def holds(path: Path) -> bool:
    """Whether a path is still that of the folder which a block of this thread began with there, or of another one's."""
    try:
        there = identity_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    blocks = [(begun, folder.identity) for begun, folder in _held.get() if not folder.closed]
    own = {identity for begun, identity in blocks if begun == path.absolute()}
    return there in (own or {identity for _, identity in blocks})


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
    top, opened = held_above(within) or (within, None)
    parts, shown = (path if opened is None else path.absolute()).relative_to(top).parts, top
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
        again = None if opened is None else opened.opened_again()
        folder = os.open(top, _FOLDER) if again is None else again
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


def held_above(path: Path) -> tuple[Path, OpenFolder] | None:
    """The nearest folder at or above a path that this thread holds open."""
    held, whole = {begun: folder for begun, folder in _held.get() if folder.descriptor is not None}, path.absolute()
    for above in (whole, *whole.parents) if held else ():
        if above in held and ".." not in whole.relative_to(above).parts:
            return above, held[above]
    return None


@contextmanager
def reachable(path: Path) -> Iterator[Path]:
    """A path for what opens files by their paths alone: of a folder that this thread holds, through what is open.

    Linux has such paths. Elsewhere it is the file's own, which another folder may have by now.
    """
    if held_above(path) is None:
        yield path
        return
    with place_of(path, path.parent) as (name, folder):
        through = Path(f"/proc/self/fd/{folder}")
        yield through / name if folder is not None and through.is_dir() else path


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors name the whole path."""
    try:
        yield
    except IrregularFileError:
        raise
    except OSError as error:
        error.filename = str(path)
        del error.filename2  # of a file that is renamed; None would be shown
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
