"""The GPU lane keeps its time limit, its results and its promises, on any machine."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.harness.environment import COMMIT
from benchmarks.harness.processes import ROOT, Outcome, variables
from benchmarks.lane import command as lane
from benchmarks.lane import plan, step
from benchmarks.lane import steps as lane_steps
from benchmarks.lane.step import Gathered, LaneStep
from tests.benchmarks.test_report import CEILINGS, MEASURED, SLOW, record


def python(name, code, seconds=0.0, proves=True):
    return LaneStep(name, (sys.executable, "-S", "-c", code), seconds, proves=proves)


def run(steps, seconds, out):
    gathered = Gathered(out / "benchmarks.jsonl", out / "part.jsonl")
    return lane.run_all(steps, seconds, out, variables(), gathered), gathered


@pytest.fixture
def hurry(monkeypatch):
    """The same with shorter waits."""
    for module in (lane, step):
        monkeypatch.setattr(module, "GRACE", 0.5)


@pytest.mark.slow
def test_failures_of_ours_are_told_from_others_and_failed_tests_end_the_measurements(tmp_path, hurry):
    interrupted = "trap 'kill $!; echo 1 failed in 0.1s; exit 1' INT; sleep 60 & wait"
    steps = [
        LaneStep("attention", ("sh", "-c", interrupted, "--record"), 1.0, proves=True),
        python("none", "raise SystemExit(5)", 10.0),
        python("profile", "raise SystemExit(4)", 10.0, proves=False),
        LaneStep("tuning", ("nothing",), 0.0, needs=("no_such_module",)),
        python("tests", "import sys; print('3 failed, 5 passed in 1.20s'); sys.exit(1)", 10.0),
        LaneStep("packing", ("nothing", "--record"), 10.0, proves=True),
    ]
    (cut, *outcomes), _ = run(steps, 47.0, tmp_path)
    assert cut.state.startswith("cut after ")
    assert cut.state.endswith(" s: 1 failed")
    assert cut.wrong
    assert [(outcome.name, outcome.state, outcome.wrong) for outcome in outcomes] == [
        ("none", "nothing to run", False),
        ("profile", "failed, exit code 4", False),
        ("tuning", "left out: no no_such_module", False),
        ("tests", "failed, exit code 1: 3 failed, 5 passed", True),
        ("packing", "left out: tests failed", False),
    ]


@pytest.mark.slow
def test_rows_are_gathered_while_steps_run(tmp_path, hurry):
    runs = [record(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate((MEASURED, SLOW))]
    copy = (
        "import pathlib, shutil, sys, time; shutil.copy(sys.argv[1], sys.argv[3]); print(sys.argv[4:])\n"
        "gathered = pathlib.Path(sys.argv[3]).with_name('benchmarks.jsonl')\n"
        "while not (gathered.is_file() and b'row' in gathered.read_bytes()): time.sleep(0.05)\n"
        "time.sleep(float(sys.argv[2]))"
    )
    steps = [
        LaneStep(
            name,
            (sys.executable, "-S", "-c", copy, str(path), wait, str(tmp_path / "part.jsonl"), "--record"),
            proves=True,
        )
        for name, path, wait in (("layer_norm", runs[0], "0"), ("attention", runs[1], "60"))
    ]
    outcomes, gathered = run(steps, 4.0, tmp_path)
    lines = [json.loads(line) for line in gathered.path.read_text(encoding="utf-8").splitlines()]
    assert [sorted(line) for line in lines] == [["format", "machine"], ["row"], ["row"]]
    assert [outcome.state[:4] for outcome in outcomes] == ["done", "cut "]
    gathered.finish(["attention"])
    last = json.loads(gathered.path.read_text(encoding="utf-8").splitlines()[-1])
    assert last == {"ceilings": CEILINGS, "cut": ["attention"]}


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


@pytest.mark.slow
def test_the_dry_run_of_the_facts(tmp_path, capsys):
    out = tmp_path / "facts"
    assert lane.main(["--dry-run", "--only", "facts", "--minutes", "1", "--out", str(tmp_path)]) == 0
    facts = json.loads((out / "facts.json").read_text(encoding="utf-8"))
    assert {"date", "commit", "python", "torch", "processor"} <= facts["machine"].keys()
    assert set(facts["ceilings"]) == {"copy", "matmul_bfloat16", "matmul_float16", "matmul_float32"}
    printed = capsys.readouterr().out
    assert (out / "summary.txt").read_text(encoding="utf-8") in printed
    assert "of commit 0123456" in printed
    assert len(list(out.iterdir())) <= 8


@pytest.mark.parametrize(
    ("arguments", "commit", "message"),
    [
        (["--minutes", "0"], "0123456", "--minutes is 0; allowed is more than 0"),
        (["--minutes", "nan"], "0123456", "--minutes is nan"),
        (
            ["--only", "fact"],
            "0123456",
            "unknown 'fact'; known runs: tests, ops, positions, training, models, compiled",
        ),
        (["--out", __file__], "0123456", "is not an empty folder"),
        ([], "", f"{COMMIT}: the commit is ''"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(arguments, commit, message, refused, monkeypatch):
    monkeypatch.setenv(COMMIT, commit)
    monkeypatch.setattr(lane, "run_all", None)
    assert message in refused(lane.main, *arguments)


def test_every_benchmark_is_in_a_run_and_every_run_fits_into_its_time(tmp_path):
    files = {path.stem.removeprefix("bench_"): path for path in (ROOT / "benchmarks").glob("bench_*.py")}
    names = [name for steps in plan.PLAN.values() for name in steps]
    assert len(names) + len(plan.PLAN) == len({*names, *plan.PLAN})
    assert {name for name in names if name in files} == set(files)

    def left_to(words):
        steps = [plan.step_of(name, 0.0, tmp_path, tmp_path / "part", False).arguments for name in names]
        return {part for command in steps if words in command for part in command if part.startswith("benchmarks/")}

    assert left_to("not (compile or flex)") == {f"benchmarks/{path.name}" for path in files.values()}
    compiled = {p for p in files.values() if re.search(r'"(torch\.nn-)?compile"|"flex"', p.read_text(encoding="utf-8"))}
    assert left_to("compile or flex") == {f"benchmarks/{path.name}" for path in compiled}
    for run, minutes in {
        "tests": 8.0,
        "ops": 9.0,
        "positions": 2.0,
        "training": 9.0,
        "models": 9.5,
        "compiled": 9.0,
    }.items():
        asked = plan.chosen(run, dry=False)
        assert list(asked) == ["facts", *plan.PLAN[run]]
        assert sum(asked.values()) <= lane._without_summary(60 * minutes)


def test_every_step_has_the_seconds_that_are_kept_for_it(tmp_path, monkeypatch):
    limits = {}

    def note(step, limit, *further):
        limits[step.name] = limit
        return Outcome(step.name, "done")

    monkeypatch.setattr(lane, "run_step", note)
    monkeypatch.setattr("benchmarks.lane.command.time.monotonic", lambda: 0.0)  # however busy the machine is
    assert lane.main(["--only", "positions", "--out", str(tmp_path)]) == 0
    for name, kept in plan.chosen("positions", dry=False).items():
        assert limits[name] >= kept - 1e-6


def test_every_test_that_needs_a_gpu_is_run(tmp_path):
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [path for path in files if re.search(r"^ *pytestmark = MARKS$", path.read_text("utf-8"), re.MULTILINE)]
    chosen = plan.step_of("gpu-tests", 0.0, tmp_path, tmp_path / "part", False).arguments
    assert {str(path.relative_to(ROOT)) for path in marked} == {part for part in chosen if part.endswith(".py")}


def test_what_does_not_fit_leaves_its_time_to_others_and_the_run_incomplete(tmp_path, monkeypatch):
    steps = [python(name, "", seconds) for name, seconds in (("a", 3.0), ("b", 5.0), ("c", 2.0), ("d", 1.0))]
    assert [step.name for step in plan.fitting(steps, 5.0)] == ["a", "c"]
    ran = []

    def run_all(steps, seconds, out, variables, gathered):
        ran.extend(step.name for step in steps)
        record(gathered.part, [MEASURED])
        gathered.collect()
        return []

    monkeypatch.setattr(lane, "run_all", run_all)
    assert lane.main(["--only", "ops", "--minutes", "3", "--out", str(tmp_path)]) == 0
    last = json.loads((tmp_path / "ops" / "benchmarks.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["cut"] == [name for name in plan.PLAN["ops"] if name not in ran]
    assert ran[:2] == ["facts", "layer_norm"]
    assert last["cut"][-1] == "ops-compiled"


def test_the_profile_shows_what_training_does_and_not_the_dispatcher():
    pytest.importorskip("triton")
    text = lane_steps._layer_norm(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert "aten::" in text
    assert "fastformer::" not in text
