"""Processes against a deadline keep their time, say what they can, and leave nothing running."""

import signal
import subprocess
import sys
import time

import pytest

from benchmarks.harness.processes import POLL, ROOT, Command, Process, variables
from tests.support.processes import ends

SLEEPS = "import time; time.sleep(60)"
CHILD = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {SLEEPS!r}]).pid, flush=True)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def python(name, *code, seconds=0.0, alone=False):
    return Command(name, (sys.executable, "-S", "-c", "; ".join(code)), seconds, alone)


def outcome_of(command, limit, log, grace=0.5):
    process = Process(command, limit, grace, log, variables())
    while (outcome := process.poll()) is None:
        time.sleep(POLL)
    return outcome, log.read_text(encoding="utf-8")[process.output :]


@pytest.mark.slow
def test_what_does_not_end_is_killed_with_all_it_started(tmp_path):
    outcome, printed = outcome_of(python("hangs", DEAF, CHILD, SLEEPS), 1.0, tmp_path / "log.txt")
    assert (outcome.state, outcome.ended) == ("cut after 1 s", False)
    assert 1.5 <= outcome.seconds < 3
    assert ends(int(printed))


@pytest.mark.slow
def test_what_is_interrupted_may_end_its_work(tmp_path):
    shell = "trap 'kill $!; echo evaluated; exit' INT; sleep 60 & wait"  # at once on a busy machine, too
    outcome, printed = outcome_of(Command("long", ("sh", "-c", shell)), 1.0, tmp_path / "log.txt", grace=30.0)
    assert (outcome.state, printed) == ("cut after 1 s", "evaluated\n")
    assert outcome.seconds < 20


def test_what_ends_leaves_nothing_running(tmp_path):
    outcome, printed = outcome_of(python("parent", CHILD, "raise SystemExit(7)"), 30.0, tmp_path / "log.txt")
    assert (outcome.state, outcome.ended) == ("failed, exit code 7", True)
    assert ends(int(printed))


def test_a_killed_program_ends_its_processes(tmp_path):
    program = (
        "import pathlib, sys, benchmarks.recipes.command as recipes; from benchmarks.harness import processes\n"
        "processes.exit_when_terminated()\n"
        f"hangs = processes.Command('x', (sys.executable, '-S', '-c', {f'{CHILD}; {SLEEPS}'!r}))\n"
        "recipes.run_all([hangs], 60.0, 1, pathlib.Path(sys.argv[1]))\n"
    )
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", program, str(log)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "x: begun" in process.stdout.readline()
    while not (printed := log.read_text(encoding="utf-8").splitlines()[2:]):
        time.sleep(POLL)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()
    assert ends(int(printed[0]))
