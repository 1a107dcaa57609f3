"""A broken stream ends the progress output, and Ctrl-C a command without a traceback."""

import os
import sys

import pytest

from fastformer.apps import cli
from fastformer.apps.train import CheckpointFolder
from tests.support.train_task import config, trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, /dev/full and closed pipes")


def last_step(run):
    return CheckpointFolder(run / "checkpoints").open().step


class Broken:
    """A stream whose writes fail after the first `good`."""

    def __init__(self, error, good=0):
        self.error, self.good, self.asked = error, good, 0

    def write(self, text):
        self.asked += 1
        if self.asked > self.good:
            raise self.error
        return len(text)

    def flush(self):
        if self.asked > self.good:
            raise self.error

    def isatty(self):
        return False


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("closed")], ids=repr)
def test_a_broken_stream_ends_the_showing_and_no_run(tmp_path, monkeypatch, error, good):
    stream = Broken(error, good)
    monkeypatch.setattr(sys, "stderr", stream)
    result = trainer(tmp_path, config(), show=True).fit()
    assert result.reason == "steps"
    assert last_step(tmp_path) == 20
    assert stream.asked == good + 1


def test_ctrl_c_shows_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130
