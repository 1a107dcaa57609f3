"""Files and folders that get their name in one step.

Until then they have hidden ones that nobody else has: two containers may have a process of the same number, and one
that was killed leaves its own behind.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOUNTED = (errno.EBUSY, errno.EXDEV)  # of a rename that would replace a mount
_SHOWN = 50  # characters of the name in a hidden one, which must not become too long
_HIDDEN = re.compile(r"\.[a-z0-9_]{8}\.tmp$")  # how such a one ends, by `tempfile`


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error that names none, as that of a full disk, which comes from a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace a file in one step: after a crash or on a full disk the old content is still there, whole.

    A link stays one, and its target is replaced. What is no file (a device such as /dev/null, a pipe) is written to;
    so is what is open (/dev/stdout, /dev/fd/3), at its end, and a file that is a mount (a
    container's), which nothing can replace, once the new content is on the disk.

    Raises OSError where nothing can be written, such as IsADirectoryError.
    """
    path = Path(path)
    if path.exists() and not is_replaced(path):
        with naming(path), open_output(path) as file:
            file.write(data)
        return
    path = Path(os.path.realpath(path))
    with naming(path):
        descriptor, temporary = tempfile.mkstemp(".tmp", f".{path.name[:_SHOWN]}.", path.parent)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, usual_mode(0o666))
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            if error.errno not in MOUNTED:
                raise
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    with naming(f"{path}, of which {temporary} is what it should hold"):
        path.write_bytes(data)
    os.unlink(temporary)


def open_output(path: Path, buffering: int = -1) -> Any:
    """A file that is written to from its begin, or what is named as open (/dev/stdout, /dev/fd/3), at its end."""
    number = _descriptor(path)
    return path.open("wb", buffering) if number is None else open(number, "ab", buffering, closefd=False)


def is_replaced(path: Path) -> bool:
    """Whether what is there is a file in a folder, and not named as what is open, which others write to as well."""
    try:
        in_folder = path.is_file() and os.path.samefile(path, os.path.realpath(path))  # not removed since it was opened
        return in_folder and _descriptor(path) is None
    except OSError:
        return False


def _descriptor(path: Path) -> int | None:
    """Of /dev/stdout, /dev/fd/3 and links to them, where they may be written to."""
    with suppress(OSError, ValueError, ImportError):
        import fcntl

        while path.is_symlink():
            if path.parent.samefile("/dev/fd"):
                writable = fcntl.fcntl(int(path.name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                return int(path.name) if writable else None
            path = path.parent / os.readlink(path)
    return None


def hidden_folder(path: Path) -> Path:
    """Make a folder beside `path`, to be renamed to it once it is whole."""
    with naming(path):
        made = tempfile.mkdtemp(".tmp", f".{path.name[:_SHOWN]}.", path.parent)
    os.chmod(made, usual_mode(0o777))
    return Path(made)


def hidden_folders(path: Path) -> list[Path]:
    """The folders from `hidden_folder` beside `path` that have not been renamed: of somebody killed, or at work."""
    begin = f".{path.name[:_SHOWN]}."
    return sorted(each for each in path.parent.iterdir() if each.name.startswith(begin) and _HIDDEN.search(each.name))


def usual_mode(bits: int) -> int:
    """Who may do what with a new file, as the system's `open` and `mkdir` set it."""
    mask = os.umask(0)
    os.umask(mask)
    return bits & ~mask
