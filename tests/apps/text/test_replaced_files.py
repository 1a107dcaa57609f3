"""Files that are replaced in one step, and what is written to where it is: links, pipes, what is open."""

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastformer.apps.cli.console import check_output
from fastformer.apps.text import (
    write_atomic,
    write_lines,
    write_texts,
)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastformer.apps.system.atomic.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_being_written_is_nobody_elses(tmp_path):
    """Processes of two containers may have one number, and a killed one leaves its file behind."""
    theirs = tmp_path / f".file.{os.getpid()}.tmp"
    theirs.write_bytes(b"theirs")
    write_atomic(tmp_path / "file", b"new")
    assert theirs.read_bytes() == b"theirs"
    (tmp_path / "other").write_bytes(b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode
    write_atomic(tmp_path / ("n" * 250), b"long")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path):
    """A rename would put a file in the place of /dev/null, for whoever may do that."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(tmp_path / "pipe", b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", b"new")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of what is open")
def test_an_open_file_without_a_name_is_written_to(tmp_path):
    """A file called `file (deleted)` was made, and the open one stayed empty."""
    with (tmp_path / "file").open("w+b") as file:
        (tmp_path / "file").unlink()
        write_lines(Path(f"/dev/fd/{file.fileno()}"), ["one", "two"])
        file.seek(0)
        assert file.read() == b"one\ntwo\n"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of what is open")
def test_what_is_open_is_written_to_where_it_stands(tmp_path):
    """As `--output /dev/stdout >> log`: the log's earlier lines were replaced, and later ones went nowhere."""
    (tmp_path / "log").write_bytes(b"earlier\n")
    with (tmp_path / "log").open("ab") as file:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for path in (Path(f"/dev/fd/{file.fileno()}"), tmp_path / "link"):
            write_atomic(path, b"more\n")
            write_texts(path, ["texts"])
        file.write(b"later\n")
    assert (tmp_path / "log").read_bytes() == b"earlier\n" + b"more\ntexts\n" * 2 + b"later\n"
    with (tmp_path / "log").open("rb") as file:  # which cannot be written to
        write_atomic(Path(f"/dev/fd/{file.fileno()}"), b"new")
    assert (tmp_path / "log").read_bytes() == b"new"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of what is open")
def test_what_another_process_has_open_is_written_to_at_its_end(tmp_path):
    """As `--output /proc/1/fd/1` in a container, whose log was replaced, or emptied."""
    (tmp_path / "log").write_bytes(b"earlier\n")
    with (tmp_path / "log").open("ab") as file:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file)
        try:
            (tmp_path / "link").symlink_to(f"/proc/{other.pid}/fd/1")
            for path in (f"/proc/{other.pid}/fd/1", f"/proc/thread-self/fd/{file.fileno()}", tmp_path / "link"):
                write_atomic(Path(path), b"more\n")
                write_texts(path, ["texts"])
        finally:
            other.communicate(b"\n")
        file.write(b"later\n")
    assert (tmp_path / "log").read_bytes() == b"earlier\n" + b"more\ntexts\n" * 3 + b"later\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs other users")
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of what is open")
def test_what_is_open_is_written_to_by_whom_its_name_would_refuse(tmp_path):
    """As standard output under `sudo -u`, or of a file whose folder is gone: a descriptor asks for nothing more."""
    gone = tmp_path / "folder"
    gone.mkdir()
    with tempfile.TemporaryFile(dir=gone) as file, (gone / "log").open("wb+") as log:
        reader, writer = os.pipe()
        (gone / "log").unlink()
        gone.rmdir()
        try:
            os.setresuid(1234, 1234, 0)
            for number in (writer, file.fileno(), log.fileno()):
                check_output(Path(f"/dev/fd/{number}"))
                write_atomic(f"/dev/fd/{number}", b"new")
        finally:
            os.setresuid(0, 0, 0)
        assert [os.read(reader, 9), os.pread(file.fileno(), 9, 0), os.pread(log.fileno(), 9, 0)] == [b"new"] * 3
        os.close(reader)
        os.close(writer)


def test_links_in_a_circle_are_not_followed_for_ever(tmp_path):
    for name, other in (("a", "b"), ("b", "a"), ("self", "self")):
        (tmp_path / name).symlink_to(other)
    for name in ("a", "self"):
        write_atomic(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"


def test_a_replaced_file_is_readable_by_whom_it_was(tmp_path):
    (tmp_path / "private").touch(0o600)
    write_atomic(tmp_path / "private", b"new")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs other users")
@pytest.mark.parametrize(
    ("writer", "groups", "found"),
    [
        (0, [], (1234, 5678, 0o664)),  # root took a file from him whose it was, who then could not read it
        (1234, [5678], (1234, 5678, 0o664)),
        (1234, [], (1234, 100, 0o644)),  # who may not give it to that group: another one gets no more than all
    ],
)
def test_a_replaced_file_keeps_its_owner_and_group_or_that_group_loses_it(writer, groups, found):
    before = os.getgroups()
    with tempfile.TemporaryDirectory() as made:  # pytest's are for root alone
        file = Path(made) / "file"
        file.touch()
        file.chmod(0o664)
        os.chown(file, 1234, 5678)
        os.chown(made, 1234, -1)
        try:
            os.setgroups(groups)
            os.setegid(100 if writer else 0)
            os.seteuid(writer)
            write_atomic(file, b"new")
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(before)
        status = file.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == found


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="needs lists of access")
def test_a_replaced_file_keeps_its_list_of_access(tmp_path):
    """Beside one, a mode's bits of the group say what users of the list may: not what the group may."""
    name, nobody = "system.posix_acl_access", 2**32 - 1
    entries = [(1, 6, nobody), (2, 6, 1234), (4, 0, nobody), (16, 6, nobody), (32, 0, nobody)]
    listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    file = tmp_path / "file"
    file.touch(0o600)
    try:
        os.setxattr(file, name, listed)
    except OSError:
        pytest.skip("this file system has none")
    write_atomic(file, b"new")
    assert os.getxattr(file, name) == listed
    # What a folder gives to new files is not given to one that lacked it.
    os.removexattr(file, name)
    file.chmod(0o640)
    os.setxattr(tmp_path, "system.posix_acl_default", listed)
    write_atomic(file, b"newer")
    assert name not in os.listxattr(file)
    assert file.stat().st_mode & 0o777 == 0o640
