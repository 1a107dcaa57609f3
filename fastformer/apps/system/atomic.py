"""Files and folders that get their name in one step.

Until then they have hidden ones that nobody else has: two containers may have a process of the same number, and one
that was killed leaves its own behind.
"""

import errno
import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fastformer.apps.system.outputs import check_replaceable, is_replaced, open_output

logger = logging.getLogger("fastformer")

MOUNTED = (errno.EBUSY, errno.EXDEV)  # of a rename that would replace a mount
_SHOWN = 50  # characters of the name in a hidden one, which must not become too long
_HIDDEN = re.compile(r"\.[a-z0-9_]{8}\.tmp$")  # how such a one ends, by `tempfile`
_ACCESS = "system.posix_acl_access"  # of Linux


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an error that names none, as that of a full disk, which comes from a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else its text is all that it says
            error.filename = str(path)
        raise


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace a file in one step: after a crash or on a full disk the old content is still there, whole.

    A link stays one, and its target is replaced; whose it is and who may read it stay, too. What is no file (a device
    such as /dev/null, a pipe) is written to; so is what is open (/dev/stdout, /proc/1/fd/1), at its end, and a file
    that is a mount (a container's), which nothing can replace, once the new content is on the disk.

    Raises OSError where nothing can be written, such as IsADirectoryError, PermissionError.
    """
    with replacing(Path(path)) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, partial: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` in one step when the block ends; see `write_atomic`.

    partial: the file is called NAME.partial until then, is written without a buffer, and stays, with a warning that
        names it, if the block raises; else it has a hidden name, and is removed then.
    """
    check_replaceable(path)
    if path.exists() and not is_replaced(path):
        with naming(path), open_output(path, 0 if partial else -1) as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    with naming(path):
        temporary, file = _new_partial(path) if partial else _new_hidden(path)
    try:
        with naming(path), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replaced = _put_in_place(temporary, path)
    except BaseException:
        with suppress(OSError):
            if partial and os.path.getsize(temporary):
                logger.warning("%s holds what was finished", temporary)
            else:
                os.unlink(temporary)
        raise
    if not replaced:
        with naming(f"{path}, of which {temporary} is what it should hold"):
            shutil.copyfile(temporary, path)
        os.unlink(temporary)


def _new_hidden(path: Path) -> tuple[str, IO[bytes]]:
    descriptor, temporary = tempfile.mkstemp(".tmp", f".{path.name[:_SHOWN]}.", path.parent)
    return temporary, os.fdopen(descriptor, "wb")


def _new_partial(path: Path) -> tuple[str, IO[bytes]]:
    """A new file NAME.partial, or NAME.2.partial where that is taken; readable for no more users than `path`."""
    for number in itertools.count(1):
        temporary = path.with_name(f"{path.name}{f'.{number}' if number > 1 else ''}.partial")
        with suppress(FileExistsError):
            mode = path.stat().st_mode & 0o600 if path.exists() else 0o666
            return str(temporary), open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", 0)
    raise AssertionError


def _put_in_place(temporary: str, path: Path) -> bool:
    """Give a file the name and the access of the one that it replaces; False if that one is a mount."""
    if path.exists():
        _give_access(temporary, path)
    else:
        set_mode(temporary, usual_mode(0o666))
    try:
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in MOUNTED:
            raise
        return False
    return True


def _give_access(temporary: str, path: Path) -> None:
    """Give a new file the owner, the group, the mode and the list of access of that which it replaces.

    Whose user may not give it to that group gives its own no more than all have.
    """
    old, listed = path.stat(), b""
    with suppress(OSError, AttributeError):  # Windows has neither
        os.chown(temporary, -1, old.st_gid)
        os.chown(temporary, old.st_uid, -1)
    with suppress(OSError, AttributeError):
        listed = os.getxattr(path, _ACCESS)
    with suppress(OSError, AttributeError):
        os.removexattr(temporary, _ACCESS)  # which the folder gave it
    bits, same = old.st_mode & 0o777, os.stat(temporary).st_gid == old.st_gid
    if listed or not same:  # beside a list, the group's bits are those of all who stand there
        bits &= 0o707 | (bits & 0o007) << 3
    set_mode(temporary, bits)
    if listed and same:
        with suppress(OSError):
            os.setxattr(temporary, _ACCESS, listed)


def hidden_folder(path: Path) -> Path:
    """Make a folder beside `path`, to be renamed to it once it is whole."""
    with naming(path):
        made = tempfile.mkdtemp(".tmp", f".{path.name[:_SHOWN]}.", path.parent)
    set_mode(made, usual_mode(0o777))
    return Path(made)


def hidden_folders(path: Path) -> list[Path]:
    """The folders from `hidden_folder` beside `path` that have not been renamed: of somebody killed, or at work."""
    begin = f".{path.name[:_SHOWN]}."
    return sorted(each for each in path.parent.iterdir() if each.name.startswith(begin) and _HIDDEN.search(each.name))


def set_mode(path: str | Path, bits: int) -> None:
    """Say who may do what with what was made just now; where the file system says so itself, it is as it is.

    One that is mounted as somebody else's (FAT, SMB) lets its maker change nothing of that, but write and read it.
    """
    with suppress(OSError):
        os.chmod(path, bits)


def usual_mode(bits: int) -> int:
    """Who may do what with a new file, as the system's `open` and `mkdir` set it."""
    mask = os.umask(0)
    os.umask(mask)
    return bits & ~mask
