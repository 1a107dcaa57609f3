"""What is shown is never worth a run: broken outputs, a closed terminal, signals."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from fastformer.apps import cli
from fastformer.apps.train import CheckpointFolder, Result, read_metrics
from fastformer.apps.translation import demo
from fastformer.apps.translation.commands import demo as demo_command
from fastformer.apps.translation.demo import run_demo
from fastformer.apps.translation.run import DataConfig, TranslationRun
from tests.apps.runs.test_run_lock import ENVIRONMENT, command
from tests.support.train_task import config, trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, /dev/full and closed pipes")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} the quick brown fox {i * 7 % 11} jumps over {i * 3 % 5}\n" for i in range(300)))
    return path


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def last_step(run):
    return CheckpointFolder(run / "checkpoints").open().step


class Broken:
    """A stream whose writes fail after the first `good`."""

    def __init__(self, error, good=0, tty=False):
        self.error, self.good, self.tty, self.asked = error, good, tty, 0

    def write(self, text):
        self.asked += 1
        if self.asked > self.good:
            raise self.error
        return len(text)

    def flush(self):
        if self.asked > self.good:
            raise self.error

    def isatty(self):
        return self.tty

    def fileno(self):
        raise OSError("none")


@pytest.mark.parametrize("tty", [False, True], ids=["file", "terminal"])
@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("closed")], ids=repr)
def test_a_broken_stream_ends_the_showing_and_no_run(tmp_path, monkeypatch, error, good, tty):
    stream = Broken(error, good, tty)
    monkeypatch.setattr(sys, "stderr", stream)
    result = trainer(tmp_path, config(), show=True).fit()
    assert result.reason == "steps"
    assert last_step(tmp_path) == 20
    assert stream.asked == good + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirected",
    [
        *("2>/dev/full", ">/dev/full 2>&1", "<&- >&- 2>&-"),
        *(pytest.param(x, marks=pytest.mark.long) for x in (">/dev/full", ">&-", "2>&-", ">&- 2>&-")),
    ],
)
def test_a_command_without_a_terminal_trains(tmp_path, text, redirected):
    words = " ".join(command(tmp_path / "run", text, "--steps", "3", "--log-every", "1"))
    ended = subprocess.run(["sh", "-c", f"exec {words} {redirected}"], env=ENVIRONMENT, timeout=600)
    assert ended.returncode == 0
    assert last_step(tmp_path / "run") == 3
    assert (tmp_path / "run" / "history.png").exists()


@pytest.mark.slow
def test_a_pipe_without_a_reader(tmp_path, text):
    words = " ".join(command(tmp_path / "run", text, "--steps", "5", "--log-every", "1", "--validate-every", "1"))
    script = f"{{ {words}; echo $? > {tmp_path / 'code'}; }} 2>&1 | head -n 2"
    subprocess.run(["sh", "-c", script], env=ENVIRONMENT, timeout=600, capture_output=True)
    assert (tmp_path / "code").read_text().strip() == "0"
    assert last_step(tmp_path / "run") == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_sets_the_exit_code(tmp_path, text, number):
    run = tmp_path / "run"
    words = command(run, text, "--steps", "1000000", "--log-every", "1", "--validate-every", "1000000")
    before = signal.signal(number, signal.SIG_DFL)  # what nohup ignores, processes under it do
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        signal.signal(number, before)
        wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0)
        process.send_signal(number)
        process.send_signal(number)  # a terminal that closes may send two
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "interrupted" in out
    assert last_step(run) >= 1
    assert read_metrics(run)[-1]["kind"] == "validation"


def test_ctrl_c_shows_no_traceback(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 130


def test_an_interrupted_demo_saves_and_ends(tmp_path, monkeypatch):
    ended = Result("interrupted", 1, 1, 1, 1.0, {}, None, None, int(signal.SIGTERM))
    monkeypatch.setattr(TranslationRun, "fit", lambda self: ended)
    with pytest.raises(SystemExit) as raised:
        run_demo(tmp_path / "demo", "fr", "cpu", Console(quiet=True))
    assert raised.value.code == 128 + signal.SIGTERM


@pytest.fixture
def short_demo(monkeypatch):
    """A demo of two steps."""
    small = {"d_model": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 8}
    monkeypatch.setattr(demo, "MODEL", {**demo.MODEL, **small})
    monkeypatch.setattr(demo, "TRAIN", replace(demo.TRAIN, epochs=None, steps=2, warmup_steps=1, batch_tokens=100))
    few = {name: corpus.take(range(40), name) for name, corpus in demo.read_corpora(DataConfig(**demo.DATA)).items()}
    monkeypatch.setattr(demo, "read_corpora", lambda data: few)


def test_a_broken_output_ends_no_demo(tmp_path, monkeypatch, short_demo):
    stream = Broken(BrokenPipeError())
    monkeypatch.setattr(sys, "stdout", stream)
    demo_command(run=tmp_path / "demo", target="fr", device="cpu")
    assert stream.asked == 1
    assert (tmp_path / "demo" / "attention.png").exists()
