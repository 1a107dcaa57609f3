"""The GPU lane keeps its time limit, its results and its promises, on any machine."""

import json
import os
import sys
import time
from dataclasses import replace

import pytest

from benchmarks import lane, lane_process
from benchmarks.lane_process import Gathered, Outcome, Step
from tests.test_benchmark_report import CEILINGS, MEASURED, SLOW, record

ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def python(name, code, weight=1.0, proves=True):
    return Step(name, (sys.executable, "-S", "-c", code), weight, proves)


def run(steps, seconds, out):
    gathered = Gathered(out / "benchmarks.jsonl", out / "part.jsonl")
    return lane.run_all(steps, seconds, out, ENVIRONMENT, gathered), gathered


@pytest.fixture
def hurry(monkeypatch):
    """The same with shorter waits."""
    for module, name, seconds in ((lane, "GRACE", 0.5), (lane_process, "GRACE", 0.5), (lane, "LEAST", 0.7)):
        monkeypatch.setattr(module, name, seconds)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_step_that_hangs_is_killed_with_all_it_started_and_the_rest_runs(tmp_path, hurry):
    child = "import time; time.sleep(60)"
    hang = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"print('child', subprocess.Popen([sys.executable, '-S', '-c', {child!r}]).pid); time.sleep(60)"
    )
    begin = time.monotonic()
    (hung, rest), _ = run([python("hangs", hang, 0.01), python("rest", "print('here')")], 20.0, tmp_path)
    assert time.monotonic() - begin < 5
    assert hung.state.startswith("cut after ")
    assert not hung.wrong
    assert not hung.ended
    assert rest.state == "done"
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "here" in log
    pid = int(log.partition("child ")[2].split()[0])
    deadline = time.monotonic() + 2
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_failures_of_ours_are_told_from_others(tmp_path, hurry):
    said = "import sys; print('3 failed, 5 passed in 1.20s'); sys.exit(1)"
    interrupted = (
        "import time\ntry:\n print('begun'); time.sleep(60)\nexcept KeyboardInterrupt:\n print('1 failed in 0.1s')"
    )
    steps = [
        python("tests", said),
        python("profile", "raise SystemExit(4)", proves=False),
        python("none", "raise SystemExit(5)"),
        Step("tuning", ("nothing",), 1.0, needs=("no_such_module",)),
        python("late", interrupted, 0.0),
        python("last", "0", 9.0),
    ]
    outcomes, _ = run(steps, 20.0, tmp_path)
    states = [(outcome.name, outcome.state, outcome.wrong) for outcome in outcomes]
    assert states[:4] == [
        ("tests", "failed, exit code 1: 3 failed, 5 passed", True),
        ("profile", "failed, exit code 4", False),
        ("none", "nothing to run", False),
        ("tuning", "left out: no no_such_module", False),
    ]
    assert states[4] == ("late", "cut after 1 s: 1 failed", True)
    assert states[5] == ("last", "done", False)


def test_steps_without_time_are_left_out(tmp_path):
    outcomes, _ = run([python("one", "0")], 5.0, tmp_path)
    assert [outcome.state for outcome in outcomes] == ["left out: no time"]


def test_rows_are_gathered_while_steps_run_and_quick_cases_are_not_repeated(tmp_path, hurry):
    runs = [record(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate((MEASURED, SLOW))]
    copy = (
        "import pathlib, shutil, sys, time; shutil.copy(sys.argv[1], sys.argv[3]); print(sys.argv[4:])\n"
        "gathered = pathlib.Path(sys.argv[3]).with_name('benchmarks.jsonl')\n"
        "while not (gathered.is_file() and b'row' in gathered.read_bytes()): time.sleep(0.05)\n"
        "time.sleep(float(sys.argv[2]))"
    )
    steps = [
        Step(
            name,
            (sys.executable, "-S", "-c", copy, str(path), wait, str(tmp_path / "part.jsonl"), "--record"),
            1.0,
            True,
        )
        for name, path, wait in (("quick", runs[0], "0"), ("attention", runs[1], "60"))
    ]
    outcomes, gathered = run(steps, 3.0, tmp_path)
    lines = [json.loads(line) for line in gathered.path.read_text(encoding="utf-8").splitlines()]
    assert [sorted(line) for line in lines] == [["format", "machine"], ["row"], ["row"]]
    assert [outcome.state[:4] for outcome in outcomes] == ["done", "cut "]
    gathered.finish(["attention"])
    last = json.loads(gathered.path.read_text(encoding="utf-8").splitlines()[-1])
    assert last == {"ceilings": CEILINGS, "cut": ["attention"]}
    assert "['--record', '-k', 'not quick']" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_the_summary_is_short_and_begins_with_what_was_missed(tmp_path):
    rows = [replace(MEASURED, benchmark=f"b{i}", ratio=2.0) for i in range(50)] + [replace(SLOW, benchmark="slow")]
    record(tmp_path / "benchmarks.jsonl", rows)
    outcomes = [Outcome(f"step{i}", "done: 1 passed", 3.0) for i in range(40)] + [Outcome("bad", "failed, exit code 1")]
    lines = lane.summary(outcomes, tmp_path)
    assert len(lines) == lane.LINES
    assert any("bad" in line for line in lines)
    ratios = [line for line in lines if " / sdpa" in line]
    assert ratios[0].startswith("slow / sdpa")
    assert ratios[0].endswith("MISSED")
    assert "0.50" in ratios[0]
    assert lines[-1].endswith("more in benchmarks.jsonl")


def test_the_dry_run_of_the_facts(tmp_path, capsys):
    out = tmp_path / "out"
    assert lane.main(["--dry-run", "--only", "facts", "--minutes", "1", "--out", str(out)]) == 0
    facts = json.loads((out / "facts.json").read_text(encoding="utf-8"))
    assert {"date", "commit", "python", "torch", "processor"} <= facts["machine"].keys()
    assert set(facts["ceilings"]) == {"copy", "matmul_bfloat16", "matmul_float16", "matmul_float32"}
    printed = capsys.readouterr().out
    assert (out / "summary.txt").read_text(encoding="utf-8") in printed
    assert "facts" in printed
    assert len(list(out.iterdir())) <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes is 0; allowed is more than 0"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--only", "fact"], "unknown step 'fact'; known: facts, gpu-tests, fused-tests, quick, attention"),
        (["--out", __file__], "is not an empty folder"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    try:
        code = lane.main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_every_benchmark_is_a_step():
    names = [step.name for step in lane.plan(lane.ROOT, lane.ROOT / "x", False, 9.0)]
    files = {path.stem.removeprefix("bench_") for path in lane.HERE.glob("bench_*.py")}
    assert names[:4] == ["facts", "gpu-tests", "fused-tests", "quick"]
    assert names[-2:] == ["tuning", "profile"]
    assert set(names[4:-2]) == files
    assert len(names) == len(set(names))
