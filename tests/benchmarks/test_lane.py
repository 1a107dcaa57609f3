"""`benchmarks.lane` runs every benchmark and GPU test within its time limit, and stops after failed tests.

The commands of benchmarks/GPU_TODO.md choose what exists, and their options are known.
"""

import re
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.mark.expression import Expression

from benchmarks import lane
from benchmarks.conftest import pytest_configure
from benchmarks.lane import ROOT, run_command
from tests.support.processes import ends
from tests.support.python import python

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
        "tests": code("import sys; print('3 failed, 5 passed in 1.20s'); sys.exit(1)"),
        "ops": code("print('measured')"),
    }
    monkeypatch.setattr(lane, "command_of", lambda name, out: commands[name])
    assert not lane.run_all([*commands], tmp_path)
    tuning, tests, end = capsys.readouterr().out.splitlines()
    assert tuning.startswith("tuning: failed, exit code 4, ")
    assert tests.startswith("tests: failed, exit code 1, ")
    assert tests.endswith(" s; 3 failed, 5 passed in 1.20s")
    assert end == "nothing is measured after failed tests"
    assert not (tmp_path / "ops").exists()


def test_every_benchmark_is_in_a_run_and_every_run_ends_within_ten_minutes(tmp_path):
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("bench_*.py")}

    def files_with(choice: str) -> list[str]:
        commands = [lane.command_of(name, tmp_path) for name in lane.RUNS]
        return sorted(Path(part).name for each in commands if choice in each for part in each if "bench_" in part)

    assert files_with("not (compile or flex)") == sorted(files)
    compiled = [
        name for name, text in files.items() if re.search(r'"(torch\.nn-)?compile"|"flex"|"reduce-overhead"', text)
    ]
    assert files_with("compile or flex") == sorted(compiled)
    assert all(run.seconds < lane.LIMIT for run in lane.RUNS.values())
    assert lane.LIMIT + lane.GRACE < 600
    assert lane.chosen_runs(None) == [*lane.RUNS]
    assert lane.chosen_runs("ops,tests") == ["tests", "ops"]


def test_every_test_that_needs_a_gpu_is_run(tmp_path):
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    tests, others = ({*lane.command_of(name, tmp_path)} for name in ("tests", "other-tests"))
    marked = {path for path, text in texts.items() if re.search(r"^ *pytestmark = MARKS$", text, re.MULTILINE)}
    moved = {path for path, text in texts.items() if re.search(r"import .*\bDEVICE\b", text)}
    assert len(marked) > 3
    assert marked < tests
    assert moved - tests <= others
    assert not {part for part in tests & others if part.endswith(".py")}


# The commands of GPU_TODO.md


def test_results_without_a_commit_are_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setenv("FASTFORMER_COMMIT", "")
    with pytest.raises(SystemExit):
        lane.main(["--only", "ops"])
    assert "FASTFORMER_COMMIT: the commit is ''" in capsys.readouterr().err
    with pytest.raises(pytest.UsageError, match="FASTFORMER_COMMIT: the commit is ''"):
        pytest_configure(SimpleNamespace(getoption={"--record": "run.jsonl"}.get))


TEXT = (ROOT / "benchmarks" / "GPU_TODO.md").read_text(encoding="utf-8")
CHOICES = re.findall(r"""\$BENCH -k (?:'([^']*)'|"([^"]*)"|(\w+))""", TEXT)
COMMANDS = re.findall(r"`(?:\w+=\S+ |compute-sanitizer )*((?:pytest|python -m) [^`$]*)`", TEXT)
FILES = re.findall(r"\b(?:tests|benchmarks|recipes)/[\w*./-]+", TEXT)


@cache
def pytest_help(folder: str) -> str:
    ran = python("-m", "pytest", folder, "--help")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def module_help(module: str) -> str:
    program = import_module(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    return printed.getvalue()


@pytest.fixture(scope="module")
def benchmark_names():
    ran = python("-m", "pytest", "benchmarks", "--collect-only", "-q", "-o", "addopts=")
    assert ran.returncode == 0, ran.stdout[-3000:]
    return [line.lower() for line in ran.stdout.splitlines() if "::" in line]


def test_commands_of_the_gpu_todo_are_listed():
    assert len(CHOICES) == TEXT.count("$BENCH -k") > 5
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    assert len(COMMANDS) == sum(bool(re.search(r"\b(pytest|python -m) ", code)) for code in inline) > 5


@pytest.mark.slow
@pytest.mark.parametrize("choice", sorted({next(filter(None, each)) for each in CHOICES}))
def test_a_choice_of_benchmarks_has_cases(choice, benchmark_names):
    expression = Expression.compile(choice)
    assert any(expression.evaluate(lambda word, name=name, **_: word.lower() in name) for name in benchmark_names)


@pytest.mark.parametrize("pattern", sorted({each for each in FILES if "/results/" not in each}))
def test_files_of_the_gpu_todo_exist(pattern):
    assert [*ROOT.glob(pattern.rstrip("."))]


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_options_in_the_gpu_todo_are_known(command):
    program, *words = command.split()
    if program == "python":
        help_text = module_help(words[1])
    else:
        help_text = pytest_help("benchmarks" if "benchmarks" in words else "tests")
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), option
