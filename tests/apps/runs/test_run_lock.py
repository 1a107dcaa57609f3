"""One writer for a run folder, and only an empty or new folder, or a run, is written to."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastformer.apps.language.run import LanguageDataConfig, LanguageRun
from fastformer.apps.system.run_lock import LOCK, RunLock, RunLockedError, locked
from fastformer.apps.train import TrainConfig, read_metrics
from tests.support.command_line import fastformer
from tests.support.python import variables
from tests.support.train_task import config, trainer, validate

ENVIRONMENT = variables(OMP_NUM_THREADS="1")
MODEL = ["--d-model", "8", "--heads", "1", "--feed-forward", "8", "--device", "cpu"]
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and flock")


def words(run, text, *more):
    given = ["--train-text", str(text), "--valid-text", str(text), "--tokenizer", "words", "--layers", "1", *MODEL]
    return ["train", "lm", "--run", str(run), *([] if "--resume" in more else given), *more]


def command(run, text, *more):
    return [sys.executable, "-m", "fastformer", *words(run, text, *more)]


def train(run, text, *more):
    return fastformer(*words(run, text, *more), cwd=text.parent)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


HOLDER = """
import sys, time
from pathlib import Path
from fastformer.apps.system.run_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that writes to a folder."""
    started = []

    def start(folder):
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE, env=ENVIRONMENT)
        started.append(process)
        assert process.stdout.readline() == b"locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@POSIX
def test_a_second_writer_is_refused_by_name_and_a_dead_one_is_followed(tmp_path, holder):
    process = holder(tmp_path / "run")
    with pytest.raises(RunLockedError, match=rf"run is being written by process {process.pid} on \S+ since 20"):
        trainer(tmp_path / "run", config()).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    process.kill()
    process.wait()
    assert (tmp_path / "run" / LOCK).exists()
    trainer(tmp_path / "run", config()).fit()
    assert not (tmp_path / "run" / LOCK).exists()
    first = holder(tmp_path / "run")
    with pytest.raises(RunLockedError, match=str(first.pid)):
        trainer(tmp_path / "run", config(steps=25)).resume()


def test_blocks_of_one_writer_stand_in_one_another(tmp_path):
    with locked(tmp_path), locked(tmp_path):
        trainer(tmp_path, config()).fit()
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()


def test_a_thread_is_one_writer(tmp_path):
    """Of two trainers in two threads, that of the second is refused by name, and leaves the first alone."""
    inside, over = threading.Event(), threading.Event()

    def hold(model):
        inside.set()
        assert over.wait(60)
        return validate(model)

    first = trainer(tmp_path, config(steps=5), validate=hold)
    thread = threading.Thread(target=first.fit, name="the first")
    thread.start()
    try:
        assert inside.wait(60)
        for write in (trainer(tmp_path, config()).fit, trainer(tmp_path, config()).resume):
            with pytest.raises(RunLockedError, match="is being written by another thread of this process, the first"):
                write()
        with pytest.raises(RunLockedError, match="another thread"), locked(tmp_path):
            pass
    finally:
        over.set()
        thread.join()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(read_metrics(tmp_path)) == 3
    with locked(tmp_path):
        trainer(tmp_path, config()).resume()
    assert not (tmp_path / LOCK).exists()


def test_a_run_may_be_made_in_one_thread_and_trained_in_another(tmp_path, text):
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    model = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
    run = LanguageRun.create(tmp_path / "run", data, model, TrainConfig(steps=1))
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run.fit(show=False)))
    thread.start()
    thread.join()
    assert ended[0].step == 1
    assert not (tmp_path / "run" / LOCK).exists()


@POSIX
@pytest.mark.parametrize("closed", ["nothing", "folder", "file", "both"])
def test_a_forked_child_is_another_writer(tmp_path, closed):
    """Of all that its parent locked, though somebody has closed the numbers of something else."""
    other = tmp_path / "other"
    other.mkdir()
    lock = RunLock(other)
    held = lock._held
    for descriptor in {
        "nothing": [],
        "folder": [held.folder.descriptor],
        "file": [held.descriptor],
        "both": [held.folder.descriptor, held.descriptor],
    }[closed]:
        os.close(descriptor)
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                with locked(tmp_path):
                    os._exit(1)
            except RunLockedError:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / LOCK).exists()
    lock.release()


@POSIX
def test_a_lock_is_removed_where_it_was_made_and_no_other(tmp_path, monkeypatch, holder):
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    lock = RunLock(Path("run"))
    other = tmp_path / "there" / "run"
    other.parent.mkdir()
    holder(other)
    monkeypatch.chdir(other.parent)  # the same name is another run now
    lock.release()
    assert not (tmp_path / "here" / "run" / LOCK).exists()
    with pytest.raises(RunLockedError):
        RunLock(other)


@POSIX
def test_the_run_that_came_after_a_moved_one_stays_locked(tmp_path, holder):
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    holder(tmp_path / "run")
    lock.release()
    with pytest.raises(RunLockedError):
        RunLock(tmp_path / "run")


@POSIX
def test_a_run_whose_lock_file_was_deleted_is_still_locked(tmp_path, holder):
    process = holder(tmp_path / "run")
    (tmp_path / "run" / LOCK).unlink()
    with pytest.raises(RunLockedError, match="is being written by another process"):
        RunLock(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()
    process.kill()
    process.wait()
    RunLock(tmp_path / "run").release()


@POSIX
def test_a_writer_whose_lock_file_was_deleted_goes_on(tmp_path):
    with locked(tmp_path):
        (tmp_path / LOCK).unlink()
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("there", [False, True])
def test_what_could_not_be_made_is_made_at_the_next_try(tmp_path, text, monkeypatch, there):
    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    model = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
    if there:
        (tmp_path / "run").mkdir()

    def interrupted(path, data, within):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fastformer.apps.runs.run.write_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LanguageRun.create(tmp_path / "run", data, model, TrainConfig(steps=1))
    gc.collect()
    LanguageRun.create(tmp_path / "run", data, model, TrainConfig(steps=1))


@POSIX
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_the_lock_is_no_way_out(tmp_path, kind):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "run").mkdir()
    if kind == "symbolic":
        (tmp_path / "run" / LOCK).symlink_to(tmp_path / "outside")
    else:
        os.link(tmp_path / "outside", tmp_path / "run" / LOCK)
    with pytest.raises(OSError, match=r"is a link"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "outside").read_text() == "mine"


@pytest.mark.slow
@POSIX
def test_of_two_commands_on_a_new_folder_one_trains(tmp_path, text):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    two = [subprocess.Popen(command(tmp_path / "run", text, "--steps", "50"), **pipes) for _ in range(2)]
    try:
        ended = [(process.communicate(timeout=600), process.returncode) for process in two]
    finally:
        for process in two:
            process.kill()
    codes = sorted(code for _, code in ended)
    assert codes == [0, 2], ended
    output, error = next(said for said, code in ended if code == 2)
    assert "is being written by process" in error or "holds a run already" in error
    assert "training:" not in output


@POSIX
def test_resume_is_refused_while_a_run_is_written(tmp_path, text, holder):
    assert train(tmp_path / "run", text, "--steps", "2").returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    process = holder(tmp_path / "run")
    ended = train(tmp_path / "run", text, "--resume", "--steps", "4")
    assert ended.returncode == 2
    assert f"is being written by process {process.pid} on" in ended.stderr
    assert before == {path: path.read_bytes() for path in before}
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert train(tmp_path / "run", text, "--resume", "--steps", "4").returncode == 0


def test_a_folder_that_is_no_run_is_left_alone(tmp_path, text):
    folder = tmp_path / "home"
    (folder / "checkpoints" / ".old-thing").mkdir(parents=True)
    for name in ("config.toml", "data.json", "metrics.csv", "checkpoints/.old-thing/letter"):
        (folder / name).write_text("mine")
    ended = train(folder, text, "--steps", "2")
    assert ended.returncode == 2
    assert f"{os.path.join('checkpoints', '.old-thing')} is not a run's" in ended.stderr
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted(
        ["config.toml", "data.json", "metrics.csv", "letter"]
    )
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"mine"}


def test_a_folder_with_one_foreign_file_is_left_alone(tmp_path, text):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    ended = train(folder, text, "--steps", "2")
    assert ended.returncode == 2
    assert "thesis.tex is not a run's" in ended.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_the_configuration_just_typed_is_not_rewritten(tmp_path, text):
    content = "# mine\n[train]\nsteps = 2\n"
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text(content)
    ended = fastformer(*words(".", text, "--config", "config.toml"), cwd=tmp_path / "new")
    assert ended.returncode == 2
    assert "config.toml" in ended.stderr
    assert (tmp_path / "new" / "config.toml").read_text() == content
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.toml"]


def test_the_configuration_typed_in_the_folder_of_a_killed_run_is_not_rewritten(tmp_path, text):
    run, content = tmp_path / "run", "# mine\n[run]\nkind = 'language'\n[train]\nsteps = 2\n"
    run.mkdir()
    (run / LOCK).touch()
    (run / "config.toml").write_text(content)
    ended = train(run, text, "--config", str(run / "config.toml"))
    assert ended.returncode == 2
    assert "would be replaced" in ended.stderr
    assert (run / "config.toml").read_text() == content


def test_a_run_that_ended_before_its_first_checkpoint_is_replaced(tmp_path, text):
    run = tmp_path / "run"
    assert train(run, text, "--steps", "1").returncode == 0
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (run / "checkpoints" / ".new-step-1").mkdir()
    assert train(run, text, "--steps", "1").returncode == 0


def test_data_that_cannot_be_read_leaves_no_folder(tmp_path, text):
    text.write_bytes(b"\xff\xfe\n")
    ended = train(tmp_path / "deep" / "run", text, "--steps", "1")
    assert ended.returncode == 2
    assert not (tmp_path / "deep").exists()


CONTENDER = """
import sys
from pathlib import Path
from fastformer.apps.system.run_lock import RunLockedError, locked
try:
    with locked(Path(sys.argv[1])):
        print("free")
except RunLockedError:
    print("locked")
"""


@pytest.mark.slow
@POSIX
def test_a_run_made_in_python_is_locked_until_it_has_trained_or_is_dropped(tmp_path, text):
    def state():
        given = {"capture_output": True, "text": True, "timeout": 60, "env": ENVIRONMENT, "check": True}
        return subprocess.run([sys.executable, "-c", CONTENDER, tmp_path / "run"], **given).stdout.strip()

    data = LanguageDataConfig(train_text=text, valid_text=text, tokenizer="words")
    model = {"d_model": 8, "heads": 1, "layers": 1, "feed_forward": 8}
    run = LanguageRun.create(tmp_path / "run", data, model, TrainConfig(steps=1))
    assert state() == "locked"
    run.fit(show=False)
    assert state() == "free"
    again = LanguageRun.open(tmp_path / "run", {"steps": 2})
    assert state() == "locked"
    del again
    gc.collect()
    assert state() == "free"


@POSIX
def test_a_file_system_without_locks_is_written_to_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()
    assert "this file system has no locks" in caplog.text
