"""What a user names as an output: a file to be replaced, a device, or what a process has open.

What is open (/dev/stdout, /dev/fd/3, /proc/1/fd/1) is written to by others as well, so it is added to.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_OPEN = re.compile(r"/proc/\d+(/task/\d+)?/fd")
_MOST_LINKS = 40  # that Linux follows


def check_replaceable(path: Path) -> None:
    """Raise PermissionError for a file that its user may not write to, which a rename would not ask.

    In a folder such as /tmp, which is everybody's, each replaces his own files alone. What this process has open to be
    written to may be written to, whosever it is: `sudo -u` leaves the pipe of who called it.
    """
    opened = _opened(path)
    if not path.exists() or (opened is not None and _is_ours(opened)):
        return
    allowed = os.access(path, os.W_OK)
    if is_replaced(path):
        file, folder = path.stat(), Path(os.path.realpath(path)).parent.stat()
        shared = folder.st_mode & stat.S_ISVTX
        allowed = allowed and not (shared and os.geteuid() not in (0, file.st_uid, folder.st_uid))
    if not allowed:
        raise PermissionError(f"{path} cannot be written")


def open_output(path: Path, buffering: int = -1) -> Any:
    """A file that is written to from its begin, or what is named as open (/dev/stdout, /proc/1/fd/1), at its end."""
    opened = _opened(path)
    if opened is None:
        return path.open("wb", buffering)
    if _is_ours(opened):  # whose place moves on with what is written
        return open(int(opened.name), "ab", buffering, closefd=False)
    return opened.open("ab", buffering)


def is_replaced(path: Path) -> bool:
    """Whether what is there is a file in a folder, and not named as what is open, which others write to as well."""
    try:
        in_folder = path.is_file() and os.path.samefile(path, os.path.realpath(path))  # not removed since it was opened
        return in_folder and _opened(path) is None
    except OSError:
        return False


def _opened(path: Path) -> Path | None:
    """The link by which Linux names what a process has open, to be written to: of /dev/stdout, and links to it."""
    with suppress(OSError):
        for _ in range(_MOST_LINKS):
            if not path.is_symlink():
                return None
            folder = Path(os.path.realpath(path.parent))  # of /dev/fd and /proc/thread-self/fd, too
            if _OPEN.fullmatch(str(folder)):
                return folder / path.name if os.lstat(path).st_mode & stat.S_IWUSR else None
            path = path.parent / os.readlink(path)
    return None


def _is_ours(opened: Path) -> bool:
    return opened.is_relative_to(os.path.realpath("/proc/self"))
