"""Files of a folder that may come from a stranger: no name in it is followed through a link, and only files are opened.

Each function takes the path of a file and `within`, the folder that its user chose, which may be a link itself (see
`places.py`). Nothing waits: a pipe would wait for its other end. Files that other libraries open by their paths
(safetensors, TensorBoard's events) are looked at with `check_path` just before.
"""

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

from fastformer.apps.system.atomic import naming, write_atomic
from fastformer.apps.system.places import NOFOLLOW, IrregularFileError, Place, irregular, named, place_of

_PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
LARGEST = 1 << 28  # bytes of a file that is read whole; an epoch of a thousand records has 200 KB of metrics


def read_file(path: Path, within: Path | None = None) -> bytes:
    """The content of a regular file of at most `LARGEST` bytes: a hole on a disk is no reason to fill the memory.

    Args:
        path: of the file.
        within: the folder below which no link is followed; None: a user's own path, which may be one.

    Raises:
        IrregularFileError: it is none, reached through a link, or out of `within` (..), or larger.
        OSError: as `open` does.
    """
    with open_regular(path, within) as file, naming(path):
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            raise IrregularFileError(errno.EFBIG, f"holds {size:,} bytes, more than {LARGEST:,}", str(path))
        return file.read()


def open_regular(path: Path, within: Path | None = None) -> BufferedReader:
    """A regular file, opened for reading; as `read_file`."""
    with place_of(path, within) as place:
        return os.fdopen(_open(path, place, os.O_RDONLY, follow=within is None), "rb")


def open_input(path: Path) -> BufferedReader:
    """A user's own input, opened for reading: a regular file, a link to one, or a pipe that somebody writes to.

    A pipe that nobody has opened for writing is empty, rather than waited for.

    Raises:
        IrregularFileError: a device, a socket.
        OSError: as `open` does.
    """
    descriptor = _open(path, (str(path), None), os.O_RDONLY, follow=True, pipes=True)
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def write_file(path: Path, data: bytes, within: Path | None = None) -> None:
    """Replace a file in one step, as `write_atomic`, where neither it nor the way to it from `within` is a link.

    It is written as `.NAME` first; what a crash left under that name is replaced. Without `within`: `write_atomic`.

    Raises:
        IrregularFileError: one of the two is there and no regular file.
        OSError: nothing can be written.
    """
    if within is None:
        write_atomic(path, data)
        return
    with place_of(path, within) as (name, folder), named(path):
        temporary = os.path.join(os.path.dirname(name), f".{os.path.basename(name)}")
        _refuse_irregular(path, (name, folder))
        if _refuse_irregular(path.with_name(f".{path.name}"), (temporary, folder)):
            os.unlink(temporary, dir_fd=folder)
        made = _new((temporary, folder))
        try:
            with made as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


def append_file(path: Path, data: bytes, within: Path) -> None:
    """Add to the end of a regular file, which is made if need be; errors as `write_file`."""
    with place_of(path, within) as place, naming(path):
        descriptor = _open(path, place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, follow=False)
        with os.fdopen(descriptor, "ab") as file:
            file.write(data)


def open_new(path: Path, within: Path) -> BufferedWriter:
    """A file that is not there yet, opened for writing; raises FileExistsError where something is."""
    with place_of(path, within) as place, named(path):
        return _new(place)


def open_file(path: Path, within: Path) -> int:
    """The descriptor of a regular file for reading and writing, which is made if need be."""
    with place_of(path, within) as place:
        return _open(path, place, os.O_RDWR | os.O_CREAT, follow=False)


def check_path(path: Path, within: Path, folder: bool | None = None) -> bool:
    """Whether a regular file or a folder is there.

    Args:
        path: of the file.
        within: the folder below which no link is followed.
        folder: whether a folder is wanted, or a file; None: either.

    Raises:
        IrregularFileError: it, or a name on the way to it from `within`, is a link, a pipe or a device.
        IsADirectoryError, NotADirectoryError: it is not what is wanted.
    """
    try:
        with place_of(path, within) as (name, above):
            mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    is_folder = stat.S_ISDIR(mode)
    if not (is_folder or stat.S_ISREG(mode)) or folder not in (None, is_folder):
        raise irregular(path, mode)
    return True


def same_file(a: Path, b: Path) -> bool:
    """Whether both are there and one file, through links and hard links too."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _new(place: Place) -> BufferedWriter:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | _PLAIN
    return os.fdopen(os.open(place[0], flags, 0o666, dir_fd=place[1]), "wb")


def _open(path: Path, place: Place, flags: int, follow: bool, pipes: bool = False) -> int:
    """The descriptor of a regular file."""
    name, folder = place
    if not follow:
        _refuse_irregular(path, place)
    with named(path):
        try:
            descriptor = os.open(name, flags | _PLAIN | (0 if follow else NOFOLLOW), 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket, or a device without a driver
                raise irregular(path, stat.S_IFSOCK) from None
            raise
    status = os.fstat(descriptor)
    mode = status.st_mode
    linked = stat.S_ISREG(mode) and status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR)
    if linked or not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        os.close(descriptor)
        raise irregular(path, stat.S_IFLNK if linked else mode)
    return descriptor


def _refuse_irregular(path: Path, place: Place) -> bool:
    """Whether a regular file is there; raises where something else is."""
    try:
        mode = os.stat(place[0], dir_fd=place[1], follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise irregular(path, mode)
    return True
