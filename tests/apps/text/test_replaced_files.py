"""Files that are replaced in one step, and streams that are written to as they are."""

import os
from pathlib import Path

import pytest

from fastformer.apps.cli.console import check_output
from fastformer.apps.system.files import write_file
from fastformer.apps.text import write_lines
from fastformer.apps.text.files import write_texts


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastformer.apps.system.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_and_not_its_temporary_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "missing" / "file", b"new")
    assert caught.value.filename == str(tmp_path / "missing" / "file")


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "file")  # root may write everything
    for write in (lambda path: check_output(path, run=tmp_path / "run"), lambda path: write_file(path, b"new")):
        with pytest.raises(PermissionError, match="cannot be written"):
            write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files")
def test_an_open_file_is_appended_to(tmp_path):
    """As with `--output /dev/stdout >> log`."""
    (tmp_path / "log").write_bytes(b"earlier\n")
    with (tmp_path / "log").open("ab") as file:
        for folder in ("/dev/fd", "/proc/self/fd"):
            write_lines(f"{folder}/{file.fileno()}", ["lines"])
            write_texts(f"{folder}/{file.fileno()}", ["texts"])
        file.write(b"later\n")
    assert (tmp_path / "log").read_bytes() == b"earlier\n" + b"lines\ntexts\n" * 2 + b"later\n"
