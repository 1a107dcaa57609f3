"""`benchmarks.lane` runs every benchmark and GPU test within its time limits, and stops after failed tests."""

import re
import sys

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
        ([CHILD], 30.0, "done"),
        ([CHILD, "raise SystemExit(7)"], 30.0, "failed, exit code 7"),
        pytest.param([DEAF, CHILD, SLEEP], 2.0, "cut after 2 s", marks=pytest.mark.slow),
    ],
    ids=["ends", "fails", "hangs"],
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
        "profile": code("raise SystemExit(4)"),
        "gpu-tests": [*code("import sys; print('3 failed, 5 passed in 1.20s'); sys.exit(1)"), "pytest"],
        "packing": code("print('measured')"),
    }
    monkeypatch.setattr(lane, "command_of", lambda step, out, dry: commands[step])
    assert not lane.run_steps(dict.fromkeys(commands, 10.0), 60.0, tmp_path, dry=True)
    lines = [re.sub(r"\d+ s;", "N s;", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "profile: failed, exit code 4, N s; ",
        "gpu-tests: failed, exit code 1, N s; 3 failed, 5 passed in 1.20s",
        "packing: left out, tests failed",
    ]


def test_steps_that_do_not_fit_leave_their_time_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr(lane.time, "monotonic", lambda: 0.0)
    limits = {}
    monkeypatch.setattr(lane, "command_of", lambda step, out, dry: [step])
    monkeypatch.setattr(
        lane, "run_command", lambda command, seconds, *further, **more: limits.update({command[0]: seconds}) or "done"
    )
    lane.run_steps({"a": 3.0, "b": 50.0, "c": 2.0}, 10.0 + lane.GRACE, tmp_path, dry=True)
    assert limits == {"a": 8.0, "c": 10.0}


def test_every_benchmark_is_in_a_run_and_every_run_fits_into_its_time(tmp_path):
    files = {path.stem.removeprefix("bench_"): path for path in (ROOT / "benchmarks").glob("bench_*.py")}
    steps = [step for run in lane.PLAN.values() for step in run]
    assert len(steps) == len(set(steps))

    def files_with(words):
        commands = [lane.command_of(step, tmp_path, dry=False) for step in steps]
        return {part for command in commands if words in command for part in command if part.startswith("benchmarks/")}

    assert files_with("not (compile or flex)") == {f"benchmarks/{path.name}" for path in files.values()}
    compiled = {p for p in files.values() if re.search(r'"(torch\.nn-)?compile"|"flex"', p.read_text(encoding="utf-8"))}
    assert files_with("compile or flex") == {f"benchmarks/{path.name}" for path in compiled}
    minutes = {"tests": 8.0, "ops": 9.0, "positions": 2.0, "training": 9.0, "models": 9.5, "compiled": 9.0}
    for run, limit in minutes.items():
        assert list(lane.chosen_steps(run, dry=False)) == list(lane.PLAN[run])
        assert sum(lane.PLAN[run].values()) <= 60 * limit - lane.GRACE


def test_every_test_that_needs_a_gpu_is_run(tmp_path):
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [path for path in files if re.search(r"^ *pytestmark = MARKS$", path.read_text("utf-8"), re.MULTILINE)]
    command = lane.command_of("gpu-tests", tmp_path, dry=False)
    assert {str(path.relative_to(ROOT)) for path in marked} == {part for part in command if part.endswith(".py")}


@pytest.mark.parametrize(
    ("arguments", "commit", "message"),
    [
        (["--minutes", "nan"], "0123456", "--minutes is nan; allowed is more than 0"),
        (["--only", "nothing"], "0123456", "unknown 'nothing'; known runs: tests, ops, positions, training, models,"),
        (["--out", str(ROOT), "--only", "ops", "--dry-run"], "", "FASTFORMER_COMMIT: the commit is ''"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(arguments, commit, message, refused, monkeypatch):
    monkeypatch.setenv("FASTFORMER_COMMIT", commit)
    assert message in refused(lane.main, *arguments)


@pytest.mark.slow
def test_the_dry_run_writes_a_profile_without_the_dispatcher(tmp_path):
    pytest.importorskip("triton")
    assert lane.main(["--dry-run", "--only", "profile", "--minutes", "30", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "profile" / "profile.txt").read_text(encoding="utf-8")
    assert "aten::" in text
    assert "fastformer::" not in text
