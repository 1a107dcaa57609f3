"""`benchmarks.lane` runs every benchmark and GPU test within its time limits, and stops after failed tests."""

import re
import sys
from unittest import mock

import pytest

from benchmarks import lane
from benchmarks.lane import ROOT, run_command
from tests.support.processes import ends

SLEEP = "import time; time.sleep(60)"
CHILD = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]).pid, flush=True)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"


def code(*lines: str) -> list[str]:
    return [sys.executable, "-S", "-c", "; ".join(lines)]


@pytest.mark.parametrize(
    ("lines", "seconds", "state"),
    [
        ([CHILD, "raise SystemExit(7)"], 30.0, "failed, exit code 7"),
        pytest.param([DEAF, CHILD, SLEEP], 2.0, "cut after 2 s", marks=pytest.mark.slow),
    ],
    ids=["fails", "hangs"],
)
def test_a_command_leaves_no_process_running(lines, seconds, state, tmp_path):
    log = tmp_path / "log.txt"
    assert run_command(code(*lines), seconds, log, grace=0.5) == state
    assert ends(int(log.read_text(encoding="utf-8").splitlines()[2]))


@pytest.mark.slow
def test_an_interrupted_command_can_write_its_results(tmp_path):
    shell = "trap 'kill $!; echo evaluated; exit' INT; echo ready; sleep 60 & wait"
    assert run_command(["sh", "-c", shell], 2.0, tmp_path / "log.txt", grace=30.0) == "cut after 2 s"
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith("ready\nevaluated\n")


def test_nothing_is_measured_after_failed_tests(tmp_path, monkeypatch, capsys):
    commands = {
        "tuning": code("raise SystemExit(4)"),
        "gpu-tests": code("import sys; print('3 failed, 5 passed in 1.20s'); sys.exit(1)"),
        "packing": code("print('measured')"),
    }
    monkeypatch.setattr(lane, "command_of", lambda step, out: commands[step])
    assert not lane.run_steps(dict.fromkeys(commands, 30.0), tmp_path)
    tuning, tests, packing = capsys.readouterr().out.splitlines()
    assert tuning.startswith("tuning: failed, exit code 4, ")
    assert tests.startswith("gpu-tests: failed, exit code 1, ")
    assert tests.endswith(" s; 3 failed, 5 passed in 1.20s")
    assert packing == "packing: left out, tests failed"


def test_a_step_gets_the_time_that_earlier_ones_left(tmp_path, monkeypatch):
    monkeypatch.setattr(lane.time, "monotonic", lambda: 0.0)
    (tmp_path / "log.txt").touch()
    run_command = mock.Mock(return_value="done")
    monkeypatch.setattr(lane, "run_command", run_command)
    assert lane.run_steps({"packing": 3.0, "decoding": 2.0}, tmp_path)
    assert [call.args[1] for call in run_command.call_args_list] == [3.0, 5.0]


def test_every_benchmark_is_in_a_run_and_every_run_ends_within_ten_minutes(tmp_path):
    files = {path.stem.removeprefix("bench_"): path for path in (ROOT / "benchmarks").glob("bench_*.py")}
    steps = [step for run in lane.PLAN.values() for step in run]
    assert len(steps) == len(set(steps))

    def files_with(words):
        commands = [lane.command_of(step, tmp_path) for step in steps]
        return {part for command in commands if words in command for part in command if part.startswith("benchmarks/")}

    assert files_with("not (compile or flex)") == {f"benchmarks/{path.name}" for path in files.values()}
    compiled = {p for p in files.values() if re.search(r'"(torch\.nn-)?compile"|"flex"', p.read_text(encoding="utf-8"))}
    assert files_with("compile or flex") == {f"benchmarks/{path.name}" for path in compiled}
    for run, plan in lane.PLAN.items():
        assert lane.chosen_steps(run) == plan
        assert sum(plan.values()) + lane.GRACE * len(plan) < 600


def test_every_test_that_needs_a_gpu_is_run(tmp_path):
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [path for path in files if re.search(r"^ *pytestmark = MARKS$", path.read_text("utf-8"), re.MULTILINE)]
    command = lane.command_of("gpu-tests", tmp_path)
    assert {str(path.relative_to(ROOT)) for path in marked} == {part for part in command if part.endswith(".py")}


@pytest.mark.parametrize(
    ("arguments", "commit", "message"),
    [
        (["--only", "nothing"], "0123456", "unknown 'nothing'; known runs: tests, ops, positions, training, models,"),
        (["--out", str(ROOT), "--only", "ops"], "", "FASTFORMER_COMMIT: the commit is ''"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(arguments, commit, message, refused, monkeypatch):
    monkeypatch.setenv("FASTFORMER_COMMIT", commit)
    assert message in refused(lane.main, *arguments)
