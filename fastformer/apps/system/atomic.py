"""Files that are replaced in one step."""

import os
from pathlib import Path


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace a file in one step: after a crash or on a full disk the old content is still there, whole.

    A link stays one, and its target is replaced. What is no file (a device such as /dev/null, a pipe) is written to.

    Raises OSError where nothing can be written, such as IsADirectoryError.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
