"""Files that are replaced in one step."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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

    A link stays one, and its target is replaced. What is no file (a device such as /dev/null, a pipe) is written to.

    Raises OSError where nothing can be written, such as IsADirectoryError.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with naming(path):
            path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
