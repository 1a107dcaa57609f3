"""What a full disk says: which file could not be written. A limit of a file's size fails in the same call."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastformer.apps.export.folder import new_folder
from fastformer.apps.system.atomic import write_atomic
from fastformer.apps.system.foreign_files import append_file, write_file
from fastformer.apps.system.run_lock import LOCK, RunLock
from fastformer.apps.train.checkpoint import synchronise

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


WAYS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: write_file(path, b"x" * 99, path.parent),
    "line": lambda path: append_file(path, b"x" * 99, path.parent),
    "output": lambda path: write_atomic(path, b"x" * 99),
    LOCK: lambda path: RunLock(path.parent).release(),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_file_is_named_and_nothing_is_left_of_it(name: str, tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(OSError, match="File too large") as caught:
        WAYS[name](tmp_path / name)
    assert caught.value.filename == os.fspath(tmp_path / name)
    assert name == "line" or not list(tmp_path.iterdir())
    WAYS[name](tmp_path / name)  # and there is no lock left in this process


def test_a_file_that_does_not_reach_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems say of a full disk what they have written down since: at the end."""
    (tmp_path / "weights").write_bytes(b"x")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    for path in (tmp_path / "weights", tmp_path):
        with pytest.raises(OSError, match="No space left") as caught:
            synchronise(path)
        assert caught.value.filename == os.fspath(path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device: '{}'"),
        (OSError(errno.ENOSPC, "No space left on device", "weights"), "[Errno 28] No space left on device: 'weights'"),
        (OSError("model.safetensors: No space left on device"), "model.safetensors: No space left on device"),
    ],
)
def test_an_export_names_its_folder_where_nobody_names_a_file(tmp_path: Path, error: OSError, said: str) -> None:
    """CTranslate2 writes its files itself."""
    with pytest.raises(OSError, match="No space left") as caught, new_folder(tmp_path / "exported"):
        raise error
    assert str(caught.value) == said.format(tmp_path / "exported")
    assert not list(tmp_path.iterdir())
