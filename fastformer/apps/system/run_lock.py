"""One writer for a run folder: a lock that ends with its process, however that ends.

The system's locks (flock) on the folder itself and on a file in it are what counts; on Windows, where this has not
run, a locked byte of the file. The folder's stays when somebody deletes the file, the file's is what other machines
see. What the file says, the process, its machine and since when, is for the message alone; one that a killed process
left is locked by nobody and is taken over. A process may have it for several objects, of which one thread's write at a
time; of the processes that torchrun starts, the first writes for all. On a network file system the lock is as good as
that system's: NFS since Linux 2.6.12 and SMB keep it between machines, Lustre does where it is mounted with `flock`.
One without locks is written to unlocked, with a warning.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastformer.apps.system.atomic import naming
from fastformer.apps.system.foreign_files import open_file
from fastformer.apps.system.places import held as holding

LOCK = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_SHOWN = 200  # bytes of what the file says
_BYTE = 1 << 30  # Windows keeps others from reading what is locked: a byte behind the text

logger = logging.getLogger("fastformer")


class RunLockedError(OSError):
    """Another process, or another thread of this one, writes to this run folder."""


@dataclass(eq=False)
class _Held:
    """A lock of this process; a forked child has none of them."""

    identity: tuple[int, int]  # of the folder
    path: Path  # of the file, when it was locked
    folder: int | None  # its descriptor; None on Windows, which opens none
    descriptor: int  # of the file
    process: int
    users: int = 0
    writer: threading.Thread | None = None  # which is in a block of `locked`

    def writes_to(self, path: Path) -> bool:
        """Whether this process is in a block that began with this path."""
        return self.path == path and self.writer is not None and self.process == os.getpid()


_guard = threading.RLock()  # what is dropped in the middle gives its lock back in the same thread


class RunLock:
    """The right of this process to write to `folder`, from here to `release` or the end of the process.

    Raises:
        RunLockedError: another process has it, or this one is in a block of `locked` for what was there before.
        OSError: the folder cannot be written to.
    """

    _locks: ClassVar[dict[tuple[int, int], _Held]] = {}  # by the folder

    def __init__(self, folder: Path) -> None:
        self._path = folder.absolute() / LOCK  # the program may go to another folder meanwhile
        self._held: _Held | None = None
        with _guard:
            held = self._ours()
            if held is None and any(each.writes_to(self._path) for each in self._locks.values()):
                raise _moved(folder)
            held = held or _acquire(folder, self._path)
            held.users += 1
            self._locks[held.identity] = self._held = held

    def _ours(self) -> _Held | None:
        try:
            held = self._locks.get(_identity(os.stat(self._path.parent)))
        except OSError:
            return None
        return held if held is not None and held.process == os.getpid() else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Write, in this thread alone of the process, for a block; such blocks may stand in one another.

        Raises:
            RunLockedError: another thread is in such a block.
        """
        held, me = self._held, threading.current_thread()
        assert held is not None
        with _guard:
            before = held.writer
            if before is not None and before is not me:
                raise RunLockedError(
                    f"{self._path.parent} is being written by another thread of this process, {before.name}; wait for "
                    "its end, or choose another"
                )
            held.writer = me
        try:
            with holding(self._path.parent, held.folder):
                yield
        finally:
            held.writer = before

    def release(self) -> None:
        """Give the right back; a second time does nothing."""
        with _guard:
            held, self._held = self._held, None
            if held is None or held.process != os.getpid():
                return
            held.users -= 1
            if held.users == 0:
                del self._locks[held.identity]
                if held.folder is not None:
                    os.close(held.folder)
                _remove(self._path, held.descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """`RunLock` for a block, in which no other thread writes either."""
    lock = RunLock(folder)
    try:
        with lock.alone():
            yield
    finally:
        lock.release()


def check_locked(folder: Path) -> None:
    """Refuse to write where the locked folder is no more: it may have been moved, and another run may be there.

    Raises:
        RunLockedError: this process does not have the lock of what is at `folder` now, or nothing is there.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        held = RunLock._locks.get(_identity(os.stat(folder)))
        if held is not None and held.process == os.getpid():
            return
    raise _moved(folder)


def _moved(folder: Path) -> RunLockedError:
    return RunLockedError(f"{folder} is another folder than when this run began; go on with --resume where that is")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _acquire(folder: Path, path: Path) -> _Held:
    # The file first: a folder with it is not empty, and whoever is refused takes no folder away that others write to.
    descriptor = _lock_file(folder, path)
    try:
        return _Held(_identity(os.stat(path.parent)), path, _lock_folder(folder, path), descriptor, os.getpid())
    except BaseException:
        _remove(path, descriptor)
        raise


def _remove(path: Path, descriptor: int) -> None:
    """Close a locked file, and remove it; where the folder was moved, another run's lock may be under this name."""
    with suppress(OSError):  # Windows removes no open file
        if _identity(os.stat(path, follow_symlinks=False)) == _identity(os.fstat(descriptor)):
            path.unlink()
    os.close(descriptor)


def _lock_folder(folder: Path, path: Path) -> int | None:
    """The descriptor of the locked folder; None where the system opens or locks no folders: the file's lock is all."""
    try:
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError:  # what is wrong with it, opening the file says
        return None
    try:
        _lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):  # network file systems lock what is open for writing
            return None
        raise _refusal(folder, b"") from None  # somebody deleted the file that says who it is
    return descriptor


def _lock_file(folder: Path, path: Path) -> int:
    while True:
        descriptor = open_file(path, path.parent)
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                said = os.pread(descriptor, _SHOWN, 0) if hasattr(os, "pread") else b""
                os.close(descriptor)
                raise _refusal(folder, said) from None
            logger.warning("%s: this file system has no locks; nothing keeps a second run from writing there", folder)
        with suppress(FileNotFoundError):
            if _identity(os.stat(path, follow_symlinks=False)) == _identity(os.fstat(descriptor)):
                break
        os.close(descriptor)  # the one before removed it meanwhile
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with naming(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    except OSError:  # a full disk
        _remove(path, descriptor)
        raise
    return descriptor


def _refusal(folder: Path, said: bytes) -> RunLockedError:
    who = "".join(c for c in said[:_SHOWN].decode("utf-8", "replace") if c.isprintable()) or "another process"
    return RunLockedError(f"{folder} is being written by {who}; wait for its end, or choose another")


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
