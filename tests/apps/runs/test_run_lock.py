"""One process writes to a run folder; a second writer is refused by name."""

import os
import subprocess
import sys

import pytest

from fastformer.apps.system.run_lock import LOCK, RunLockedError, locked
from tests.support.command_line import fastformer
from tests.support.python import variables
from tests.support.train_task import config, trainer

ENVIRONMENT = variables(OMP_NUM_THREADS="1")
MODEL = ["--d-model", "8", "--heads", "1", "--feed-forward", "8", "--device", "cpu"]

HOLDER = """
import sys, time
from pathlib import Path
from fastformer.apps.system.run_lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(1000)
"""


def words(run, text, *more):
    given = ["--train-text", str(text), "--valid-text", str(text), "--tokenizer", "words", "--layers", "1", *MODEL]
    return ["train", "lm", "--run", str(run), *([] if "--resume" in more else given), *more]


def command(run, text, *more):
    return [sys.executable, "-m", "fastformer", *words(run, text, *more)]


def train(run, text, *more):
    return fastformer(*words(run, text, *more), cwd=text.parent)


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


def test_a_second_writer_is_refused_by_name_and_a_killed_one_is_followed(tmp_path, text, holder):
    run = tmp_path / "run"
    assert train(run, text, "--steps", "2").returncode == 0
    files = [path for path in run.rglob("*") if path.is_file() and path.name != LOCK]
    before = {path: path.read_bytes() for path in files}
    process = holder(run)
    name = rf"run is being written by process {process.pid} on \S+ since 20"
    for _ in range(2):  # the first refusal does not remove the name
        with pytest.raises(RunLockedError, match=name):
            trainer(run, config()).fit()
        with pytest.raises(RunLockedError, match=name):
            trainer(run, config()).resume()
    refused = train(run, text, "--resume", "--steps", "4")
    assert (refused.returncode, f"process {process.pid} on" in refused.stderr) == (2, True)
    assert before == {path: path.read_bytes() for path in before}
    process.kill()
    process.wait()
    assert train(run, text, "--resume", "--steps", "4").returncode == 0


def test_blocks_of_one_process_nest(tmp_path, holder):
    with locked(tmp_path):
        with locked(tmp_path):
            trainer(tmp_path, config(steps=5)).fit()
        child = subprocess.run(
            [sys.executable, "-c", HOLDER, tmp_path], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
        )
        assert f"is being written by process {os.getpid()} on" in child.stderr
    holder(tmp_path)
    with pytest.raises(RunLockedError), locked(tmp_path):
        pass
