"""A full disk: the error names the file, and the old content stays. A limit of a file's size fails in the same call."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastformer.apps.export.weights import export_folder
from fastformer.apps.system.files import append_file, synchronise, write_file
from fastformer.apps.system.run_lock import LOCK, lock_run

if sys.platform == "win32":
    pytest.skip("needs a limit of a file's size", allow_module_level=True)

import resource


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: write_file(path, b"x" * 99),
    "appended": lambda path: append_file(path, b"x" * 99),
    LOCK: lambda path: lock_run(path.parent).release(),
}


@pytest.mark.parametrize("name", WRITES)
def test_the_error_names_the_file_whose_content_stays(name: str, tmp_path: Path) -> None:
    before = b"old" * (name == "replaced")
    (tmp_path / name).write_bytes(before)
    with largest_file(0), pytest.raises(OSError, match="File too large") as caught:
        WRITES[name](tmp_path / name)
    assert caught.value.filename == os.fspath(tmp_path / name)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, before)]
    WRITES[name](tmp_path / name)


def test_an_error_of_fsync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems report a full disk there."""
    (tmp_path / "weights").write_bytes(b"x")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    for path in (tmp_path / "weights", tmp_path):
        with pytest.raises(OSError, match="No space left") as caught:
            synchronise(path)
        assert caught.value.filename == os.fspath(path)


@pytest.mark.parametrize("named", [True, False])
def test_a_failed_export_leaves_nothing_and_the_error_names_a_file(tmp_path: Path, named: bool) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", *(["weights"] if named else []))
    with pytest.raises(OSError, match="No space left") as caught, export_folder(tmp_path / "exported"):
        raise error
    assert caught.value.filename == ("weights" if named else str(tmp_path / "exported"))
    assert not list(tmp_path.iterdir())
