"""Lock a run folder for one writing process, by filelock on the file `.lock`; the lock ends with the process.

The file stays after the lock is released. It names the process, for the error message only.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastformer.apps.system.files import add_path_to_errors

LOCK = ".lock"


class RunLockedError(OSError):
    """Another process writes to this run folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a run folder and lock it for this process during the block; blocks of one process may be nested.

    Raises:
        RunLockedError: another process holds the lock.
        OSError: the folder cannot be written to.
    """
    from filelock import FileLock, Timeout

    path = folder.absolute() / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, is_singleton=True, thread_local=False)
    with add_path_to_errors(path):
        holder = path.read_text("utf-8", "replace")[:200].strip() if path.is_file() else ""
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise RunLockedError(
                f"{folder} is being written by {holder or 'another process'}; wait for its end, or choose another"
            ) from None
    try:
        if lock.lock_counter == 1:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with add_path_to_errors(path):
                path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", "utf-8")
        yield
    finally:
        lock.release()
