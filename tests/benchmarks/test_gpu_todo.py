"""The commands of benchmarks/GPU_TODO.md: what they choose exists, and their options are known."""

import re
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO

import pytest
from _pytest.mark.expression import Expression

from tests.support.python import ROOT, python

TEXT = (ROOT / "benchmarks" / "GPU_TODO.md").read_text(encoding="utf-8")
CHOICES = re.findall(r"""\$BENCH -k (?:'([^']*)'|"([^"]*)"|(\w+))""", TEXT)
COMMANDS = re.findall(r"`(?:\w+=\S+ |compute-sanitizer )*((?:pytest|python -m) [^`$]*)`", TEXT)
FILES = re.findall(r"\b(?:tests|benchmarks|recipes)/[\w*./-]+", TEXT)

pytestmark = pytest.mark.slow


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


def test_commands_are_listed():
    assert len(CHOICES) == TEXT.count("$BENCH -k") > 5
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    assert len(COMMANDS) == sum(bool(re.search(r"\b(pytest|python -m) ", code)) for code in inline) > 5


@pytest.mark.parametrize("choice", sorted({next(filter(None, each)) for each in CHOICES}))
def test_a_choice_of_benchmarks_has_cases(choice, benchmark_names):
    expression = Expression.compile(choice)
    assert any(expression.evaluate(lambda word, name=name, **_: word.lower() in name) for name in benchmark_names)


@pytest.mark.parametrize("pattern", sorted({each for each in FILES if "/results/" not in each}))
def test_files_exist(pattern):
    assert [*ROOT.glob(pattern.rstrip("."))]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_options_are_known(command):
    program, *words = command.split()
    if program == "python":
        help_text = module_help(words[1])
    else:
        help_text = pytest_help("benchmarks" if "benchmarks" in words else "tests")
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), option
