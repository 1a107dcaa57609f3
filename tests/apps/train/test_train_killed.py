"""Runs that are killed at random moments, again and again, and resumed each time, end as the run that never was."""

import os

import pytest

from tests.support.python import python

# A process of its own, because it forks: its children train, and are killed at moments drawn by the clock.
SCRIPT = """
import os, random, shutil, signal, sys, time
from pathlib import Path

import torch
from tests.apps.train.test_train_resume import assert_equal, final, records
from tests.support.train_task import config, network, trainer

from fastformer.apps.train import CheckpointFolder

STEPS = 20
torch.set_num_threads(1)
root, kills = Path(sys.argv[1]), int(sys.argv[2])
settings = config(steps=STEPS, validate_every=3, schedule="cosine")
seconds = []
for name in ("cold", "whole"):
    started = time.monotonic()
    trainer(root / name, settings).fit()
    seconds.append(time.monotonic() - started)
random.seed(1)
killed = rounds = resumed_late = 0
while killed < kills:
    folder = root / f"parts-{rounds}"
    while True:
        child = os.fork()
        if child == 0:
            begun = bool(CheckpointFolder(folder / "checkpoints").paths())
            run = trainer(folder, settings, model=network(seed=77) if begun else network())
            if begun:
                run.resume()
            run.fit()
            os._exit(0)
        time.sleep(random.uniform(0.0, seconds[1]))
        os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] == 0:  # it was done before
            break
        killed += 1
        resumed_late += bool(CheckpointFolder(folder / "checkpoints").paths())
    assert_equal(final(folder, STEPS), final(root / "whole", STEPS))
    assert records(folder) == records(root / "whole")
    shutil.rmtree(folder)
    rounds += 1
assert resumed_late > kills // 3, (resumed_late, killed)
print("passed", killed, rounds, resumed_late)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.long)])
def test_killed_runs_end_as_the_run_that_was_not_killed(tmp_path, kills):
    run = python("-c", SCRIPT, tmp_path, str(kills), OMP_NUM_THREADS="1")
    assert run.stdout.startswith("passed"), run.stdout + run.stderr
