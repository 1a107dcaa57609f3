"""Ctrl-C and other signals: a step is finished and saved, or the run ends at once."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fastformer.apps.train import CheckpointFolder
from fastformer.apps.train.interrupt import Interrupt
from tests.support.python import ROOT
from tests.support.train_task import config, trainer

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import time
from tests.support.train_task import *

def slow_loss(model, batch):
    time.sleep(0.02)
    return summed_loss(model, batch)

def slow_validate(model):
    print("validating", flush=True)
    time.sleep(float(sys.argv[3]))
    return validate(model)

run = trainer(sys.argv[2], config(steps=100_000, validate_every=100_000, log_every=1), loss=slow_loss,
              validate=slow_validate, show=True)
print("ready", flush=True)
result = run.fit()
print(result.reason, result.step, result.metrics["loss"] > 0, flush=True)
"""


def start(folder: Path, validation_seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, ROOT, folder, str(validation_seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stderr is not None
    assert "training begins" in process.stderr.readline()
    assert "step 1" in process.stderr.readline()
    return process


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send SIGINT to one process")
def test_ctrl_c_finishes_the_step_saves_validates_and_exits_cleanly(tmp_path):
    process = start(tmp_path, 0.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    validating, ending = out.splitlines()
    assert validating == "validating"
    reason, step, validated = ending.split()
    assert (reason, validated) == ("interrupted", "True")
    assert "press Ctrl-C again to stop at once" in err
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    assert checkpoints.open().step == int(step)
    assert checkpoints.best() == checkpoints.last()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send SIGINT to one process")
def test_a_second_ctrl_c_ends_at_once_and_what_was_saved_is_there(tmp_path):
    process = start(tmp_path, 60.0)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "validating\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert CheckpointFolder(tmp_path / "checkpoints").open().step >= 1


def test_signal_handlers_are_put_back_and_other_threads_do_without(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer(tmp_path / "a", config(steps=2)).fit()
    assert signal.getsignal(signal.SIGINT) is before
    with Interrupt(lambda: None) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(trainer(tmp_path / "b", config(steps=2)).fit()))
    thread.start()
    thread.join()
    assert results[0].step == 2
