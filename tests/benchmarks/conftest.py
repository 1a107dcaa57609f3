"""What tests of the benchmarks' commands share."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness.environment import COMMIT
from tests.support.python import ROOT, python

FAULTS = ROOT / "tests" / "benchmarks"  # where the package codegen_faults is
TRITON = importlib.util.find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")


def run(*arguments: str, path: Path = FAULTS, **given: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.codegen` with the variable of the interpreter: it must compile all the same."""
    return python("-m", "benchmarks.codegen", *arguments, paths=(path,), TRITON_INTERPRET="1", **given)


@pytest.fixture(scope="session")
def faults(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """The output of codegen on `codegen_faults`, with what ptxas says; `--budget` lies in Triton's cache."""
    folder = str(tmp_path_factory.mktemp("codegen"))
    arguments = ["--cases", "codegen_faults", "--arch", "90", "--update", "--budget", f"{folder}/budget.json"]
    return run(*arguments, TRITON_CACHE_DIR=folder, TRITON_DUMP_PTXAS_LOG="1")


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    """Also where the files have no history."""
    monkeypatch.setenv(COMMIT, "0123456")
