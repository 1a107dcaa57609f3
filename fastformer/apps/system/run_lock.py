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
from fastformer.apps.system.places import OpenFolder, Place, holds, identity_of, place_of
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
    """A lock of this process."""

    path: Path  # of the file, when it was locked
    folder: OpenFolder
    descriptor: int  # of the file
    users: int = 0
    writer: threading.Thread | None = None  # which is in a block of `locked`

    def writes_to(self, path: Path) -> bool:
        """Whether this process is in a block that began with this path."""
        return self.path == path and self.writer is not None

    def close(self) -> None:
        """Close what is open of it."""
        self.folder.close()
        with suppress(OSError):
            os.close(self.descriptor)


_guard = threading.RLock()  # what is dropped in the middle gives its lock back in the same thread


class RunLock:
    """The right of this process to write to `folder`, from here to `release` or the end of the process.

    Raises:
        RunLockedError: another process has it, or this one is in a block of `locked` for what was there before.
        OSError: the folder cannot be written to.
    """

    _locks: ClassVar[dict[tuple[int, int], _Held]] = {}  # by the folder

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder.absolute() / LOCK  # the program may go to another folder meanwhile
        self._held: _Held | None = None
        with _guard:
            held = self._ours()
            if held is None and any(each.writes_to(self._path) for each in self._locks.values()):
                raise _moved(folder)
            held = held or _acquire(folder, self._path)
            held.users += 1
            self._locks[held.folder.identity] = self._held = held

    def _ours(self) -> _Held | None:
        try:
            return self._locks.get(identity_of(os.stat(self._path.parent)))
        except OSError:
            return None

    def check(self) -> None:
        """Refuse another folder than the one that was locked; raises RunLockedError."""
        held = self._ours()
        if held is None or held is not self._held:
            raise _moved(self._folder)

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
            if held is None or held.folder.closed:  # in a forked child
                return
            held.users -= 1
            if held.users == 0:
                del self._locks[held.folder.identity]
                _remove(held)


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
        RunLockedError: the folder is not the one that this thread's block of `locked` began with, or nothing is there.
    """
    if not holds(folder):
        raise _moved(folder)


def _moved(folder: Path) -> RunLockedError:
    return RunLockedError(f"{folder} is another folder than when this run began; go on with --resume where that is")


def _acquire(folder: Path, path: Path) -> _Held:
    opened = OpenFolder.at(path.parent)
    try:
        with holding(path.parent, opened):
            held = _Held(path, opened, _lock_file(folder, path))
    except BaseException:
        opened.close()
        raise
    # The file first: a folder with it is not empty, and whoever is refused takes no folder away that others write to.
    try:
        if opened.descriptor is not None:
            _lock_folder(folder, opened.descriptor)
    except BaseException:
        _remove(held)
        raise
    return held


def _remove(held: _Held) -> None:
    """Close what is locked, and remove the file from the folder, wherever that is by now."""
    path = held.path
    with suppress(OSError), holding(path.parent, held.folder), place_of(path, path.parent) as place:
        if _is_at(held.descriptor, place):
            os.unlink(place[0], dir_fd=place[1])  # Windows removes no open file
    for descriptor in (held.descriptor, held.folder.descriptor):
        if descriptor is not None:
            _unlock(descriptor)  # a child that was forked by other means than Python's may have it open too
    held.close()


def _is_at(descriptor: int, place: Place) -> bool:
    status = os.stat(place[0], dir_fd=place[1], follow_symlinks=False)
    return identity_of(status) == identity_of(os.fstat(descriptor))


def _lock_folder(folder: Path, descriptor: int) -> None:
    try:
        _lock(descriptor)
    except BlockingIOError:  # somebody deleted the file that says who it is
        raise _refusal(folder, b"") from None
    except OSError:
        pass  # network file systems lock what is open for writing: the file's lock is all


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
        with suppress(FileNotFoundError), place_of(path, path.parent) as place:
            if _is_at(descriptor, place):
                break
        os.close(descriptor)  # the one before removed it meanwhile
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with naming(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    except OSError:  # a full disk
        with suppress(OSError), place_of(path, path.parent) as place:
            os.unlink(place[0], dir_fd=place[1])
        os.close(descriptor)
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


def _unlock(descriptor: int) -> None:
    with suppress(ImportError, OSError):  # of Windows, closing unlocks it
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _forget() -> None:
    """In a forked child: it has none of the locks, and must not keep them from being given back."""
    global _guard
    _guard = threading.RLock()  # another thread of the parent may have had it
    while RunLock._locks:
        RunLock._locks.popitem()[1].close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
