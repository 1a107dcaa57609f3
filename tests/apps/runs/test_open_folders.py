"""What is written relative to a locked folder reaches that one or nothing, whatever becomes of blocks and numbers."""

import asyncio
import errno
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.runs import run as runs
from fastformer.apps.system.foreign_files import append_file, read_file, write_file
from fastformer.apps.system.foreign_folders import make_folder, names_in, remove, rename_folder
from fastformer.apps.system.places import place_of
from fastformer.apps.system.run_lock import LOCK, RunLock, RunLockedError, check_locked, locked
from fastformer.apps.train import CheckpointFolder, TrainConfig, read_metrics
from fastformer.apps.train.metrics import MetricsLog
from tests.support.train_task import config, trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows opens no folders")

MODEL = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}


@pytest.fixture
def others(tmp_path):
    """Opens another folder under every number that was just given back; `others.folder` is it."""
    (tmp_path / "other").mkdir()
    opened = []

    def take():
        opened.extend(os.open(tmp_path / "other", os.O_RDONLY) for _ in range(8))

    take.folder = tmp_path / "other"
    yield take
    for descriptor in opened:
        with suppress(OSError):
            os.close(descriptor)


def block(folder):
    with locked(folder):
        yield


def test_blocks_may_end_in_another_order_than_they_began(tmp_path, others):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    blocks = [block(one), block(two)]
    for each in blocks:
        next(each)
    blocks[0].close()
    check_locked(two)
    two.rename(tmp_path / "moved")
    write_file(two / "in the block", b"", two)
    (tmp_path / "moved").rename(two)
    blocks[1].close()
    others()
    for folder in (one, two):
        write_file(folder / "after", b"", folder)
    assert (os.listdir(one), sorted(os.listdir(two))) == (["after"], ["after", "in the block"])
    assert os.listdir(others.folder) == []


def test_a_task_that_outlives_a_block_writes_to_no_other_folder(tmp_path, others):
    """A task has the variables of the block that it began in."""
    run = tmp_path / "run"
    run.mkdir()

    async def write(over):
        await over.wait()
        write_file(run / "late", b"", run)

    async def main():
        over = asyncio.Event()
        with locked(run):
            task = asyncio.create_task(write(over))
            await asyncio.sleep(0)
        others()
        over.set()
        await task

    asyncio.run(main())
    assert (os.listdir(run), os.listdir(others.folder)) == (["late"], [])


def test_a_number_that_somebody_closed_is_another_files(tmp_path, others):
    """As programs do that become daemons."""
    run = tmp_path / "run"
    run.mkdir()
    with locked(run):
        for held in RunLock._locks.values():
            os.close(held.folder.descriptor)
        others()
        write_file(run / "file", b"", run)
        assert os.listdir(others.folder) == []
    assert os.listdir(run) == ["file"]


@pytest.mark.parametrize("parent", ["released", "killed"])
def test_a_forked_child_keeps_no_lock(tmp_path, parent):
    """As workers of a DataLoader are, which may live longer than the run."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        lock = RunLock(tmp_path)
        child = os.fork()
        if child == 0:
            os.write(write, f"{os.getpid()}\n".encode())
            time.sleep(100)
        if parent == "released":
            lock.release()
        os._exit(0)
    os.waitpid(process, 0)
    child = int(os.read(read, 99))
    try:
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_child_that_is_forked_in_a_block_has_no_lock(tmp_path):
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                check_locked(tmp_path)
            except RunLockedError:
                code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        check_locked(tmp_path)


def test_two_runs_of_one_process_that_change_places(tmp_path):
    """Each has a lock of this process, but not the other's."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()

    def change():
        one.rename(tmp_path / "three")
        two.rename(one)
        (tmp_path / "three").rename(two)

    locks = RunLock(one), RunLock(two)
    with locks[0].alone():
        check_locked(one)
        change()
        with pytest.raises(RunLockedError, match="one is another folder than when this run began"):
            check_locked(one)
        write_file(one / "of one", b"", one)
    for lock in locks:
        with pytest.raises(RunLockedError, match="is another folder than when this run began"):
            lock.check()
        lock.release()
    assert (os.listdir(one), os.listdir(two)) == ([], ["of one"])  # and no lock is left


@pytest.mark.parametrize("when", ["before", "while it is locked"])
def test_two_made_runs_that_change_places_train_in_neither(tmp_path, monkeypatch, when):
    (tmp_path / "text").write_text("".join(f"{i} the quick brown fox\n" for i in range(99)))
    data = LanguageDataConfig(train_text=tmp_path / "text", valid_text=tmp_path / "text", tokenizer="words")
    made = [LanguageRun.create(tmp_path / name, data, MODEL, TrainConfig(steps=1)) for name in ("one", "two")]
    before = {path: path.read_bytes() for path in (tmp_path / "two").rglob("*.*") if path.name != LOCK}

    def change(*_):
        if not (tmp_path / "three").exists():
            (tmp_path / "one").rename(tmp_path / "three")
            (tmp_path / "two").rename(tmp_path / "one")

    def late(folder):
        change()
        return locked(folder)

    if when == "before":
        change()
    else:
        monkeypatch.setattr(runs, "locked", late)
    with pytest.raises(RunLockedError, match="one is another folder than when this run began"):
        made[0].fit(show=False)
    (tmp_path / "one").rename(tmp_path / "two")
    made[1]._unlock()
    assert before == {path: path.read_bytes() for path in before}


def test_a_program_that_goes_to_another_folder_writes_to_no_other_run(tmp_path, monkeypatch):
    """Which has the same name there, and a lock of this process."""
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    other = RunLock(tmp_path / "there" / "run")
    with locked(Path("run")):
        monkeypatch.chdir(tmp_path / "there")
        with pytest.raises(RunLockedError):
            check_locked(Path("run"))
    other.release()


def test_the_names_in_a_folder_of_a_locked_one_are_its_own(tmp_path):
    with locked(tmp_path):
        make_folder(tmp_path / "checkpoints")
        assert names_in(tmp_path / "checkpoints") == []
        assert sorted(names_in(tmp_path)) == [LOCK, "checkpoints"]


def test_a_lock_is_removed_from_its_folder_alone(tmp_path, monkeypatch):
    """Even where another run took its place after the last look."""
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).write_text("its")
    lock = RunLock(tmp_path / "run")
    unlink = os.unlink

    def late(*arguments, **more):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "other").rename(tmp_path / "run")
        unlink(*arguments, **more)

    monkeypatch.setattr(os, "unlink", late)
    monkeypatch.setattr(Path, "unlink", late)
    lock.release()
    assert (tmp_path / "run" / LOCK).read_text() == "its"
    assert os.listdir(tmp_path / "moved") == []


@pytest.mark.parametrize("there", ["file", "nothing"])
def test_metrics_are_those_of_the_locked_folder(tmp_path, there):
    trainer(tmp_path / "run", config(steps=4, log_every=1)).fit()
    records = read_metrics(tmp_path / "run")
    with locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        if there == "file":
            (tmp_path / "run").write_text("mine")
        MetricsLog(tmp_path / "run", len(records)).close()
    assert read_metrics(tmp_path / "moved") == records


def test_a_trainer_goes_on_from_what_it_read_and_no_other_state(tmp_path):
    """Another one may train between its resuming and its training, or between two parts of that."""
    trainer(tmp_path, config(steps=4, validate_every=4)).fit()
    first = trainer(tmp_path, config(steps=12, validate_every=4, log_every=1))
    first.resume()
    second = trainer(tmp_path, config(steps=8, validate_every=4, log_every=1))
    second.resume()
    second.fit()
    before = read_metrics(tmp_path)
    with pytest.raises(ValueError, match="was written to by another trainer since this one resumed"):
        first.fit()
    assert read_metrics(tmp_path) == before
    assert CheckpointFolder(tmp_path / "checkpoints").open().step == 8
    third = trainer(tmp_path, config(steps=12, validate_every=4, log_every=1))
    third.resume()
    third.fit()
    with pytest.raises(ValueError, match="was written to by another trainer"):
        second.fit()
    third.fit()  # nobody wrote since


WRITE = {
    "write_file": lambda run: write_file(run / "file", b"", run),
    "append_file": lambda run: append_file(run / "file", b"", run),
    "make_folder": lambda run: make_folder(run / "a" / "b"),
    "rename_folder": lambda run: rename_folder(run / "a", run / "c", run),
    "remove": lambda run: remove(run / "a" / "there", run),
    "read_file": lambda run: read_file(run / "a" / "there", run),
}


@pytest.mark.parametrize("name", WRITE)
def test_no_descriptor_is_left_open(tmp_path, name):
    """However few there are, and the error names the whole path."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "there").touch()
    before = len(os.listdir("/dev/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors = []
    with locked(tmp_path):
        inside = len(os.listdir("/dev/fd"))
        for more in range(4):
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (inside - 1 + more, limits[1]))
                WRITE[name](tmp_path)
                break
            except OSError as error:
                errors.append(error)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert len(os.listdir("/dev/fd")) == inside
    assert len(os.listdir("/dev/fd")) == before
    assert errors
    assert all(each.errno == errno.EMFILE and str(tmp_path) in str(each) for each in errors)


def test_a_path_leads_nowhere_once_its_folder_is_closed(tmp_path):
    """In a thread that got the variables of a block too."""
    import contextvars

    with locked(tmp_path):
        variables = contextvars.copy_context()
    found = []

    def look():
        with pytest.raises(RunLockedError):
            check_locked(tmp_path)
        with place_of(tmp_path / "file", tmp_path) as (name, folder):
            found.append((name, os.path.samestat(os.fstat(folder), tmp_path.stat())))

    thread = threading.Thread(target=variables.run, args=(look,))
    thread.start()
    thread.join()
    assert found == [("file", True)]
