"""One writer for a run folder: a lock that ends with its process, however that ends.

The system's lock on a file (flock; on Windows, where this has not run, a locked byte) is what counts. What the file
says, the process, its machine and since when, is for the message alone; a file that a killed process left is locked by
nobody and is taken over. A process is one writer, however many of its objects write; of the processes that torchrun
starts, the first writes for all. On a network file system the lock is as good as that system's: NFS since Linux 2.6.12
and SMB keep it between machines, Lustre does where it is mounted with `flock`. One without locks is written to
unlocked, with a warning.
"""

import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from fastformer.apps.system.guarded import open_file

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_BYTE = 1 << 30  # Windows keeps others from reading what is locked: a byte behind the text

logger = logging.getLogger("fastformer")


class RunLockedError(OSError):
    """Another process writes to this run folder."""


class RunLock:
    """The right of this process to write to `folder`, from here to `release` or the end of the process.

    Raises:
        RunLockedError: another process has it.
        OSError: the folder cannot be written to.
    """

    # This process's locks, by the file that is locked: [descriptor, users, process]. A forked child has none of them.
    _held: ClassVar[dict[tuple[int, int], list[int]]] = {}

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._key: tuple[int, int] | None = None
        held = self._ours()
        if held is None:
            held = _acquire(folder, self._path)
        held[1] += 1
        status = os.fstat(held[0])
        self._key = (status.st_dev, status.st_ino)
        self._held[self._key] = held

    def _ours(self) -> list[int] | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None
        held = self._held.get((status.st_dev, status.st_ino))
        return held if held is not None and held[2] == os.getpid() else None

    def release(self) -> None:
        """Give the right back; a second time does nothing."""
        key, self._key = self._key, None
        held = self._held.get(key) if key else None
        if key is None or held is None or held[2] != os.getpid():
            return
        held[1] -= 1
        if held[1] == 0:
            del self._held[key]
            with suppress(OSError):  # Windows removes no open file
                self._path.unlink()
            os.close(held[0])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """`RunLock` for a block."""
    lock = RunLock(folder)
    try:
        yield
    finally:
        lock.release()


def _acquire(folder: Path, path: Path) -> list[int]:
    while True:
        descriptor = open_file(path, folder)
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                said = os.pread(descriptor, 200, 0).decode("utf-8", "replace") if hasattr(os, "pread") else ""
                os.close(descriptor)
                who = "".join(c for c in said if c.isprintable()) or "another process"
                raise RunLockedError(
                    f"{folder} is being written by {who}; wait for its end, or choose another"
                ) from None
            logger.warning("%s: this file system has no locks; nothing keeps a second run from writing there", folder)
        with suppress(FileNotFoundError):
            now, mine = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
            if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
                break
        os.close(descriptor)  # the one before removed it meanwhile
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return [descriptor, 0, os.getpid()]


def _lock(descriptor: int) -> None:
    """Lock a file or raise OSError at once."""
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(descriptor, _BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        os.lseek(descriptor, 0, os.SEEK_SET)
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
