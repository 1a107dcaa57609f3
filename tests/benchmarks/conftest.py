"""What tests of the benchmarks share: commands in processes of their own, and races without pytest-benchmark."""

import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.clock import Ceilings, Stopwatch
from benchmarks.harness.environment import COMMIT
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record
from tests.support.python import ROOT, python

FAULTS = ROOT / "tests" / "benchmarks"  # where the package codegen_faults is
TRITON = importlib.util.find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")


def run(*arguments: str, path: Path = FAULTS, **given: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.codegen` with the variable of the interpreter: it must compile all the same."""
    return python("-m", "benchmarks.codegen", *arguments, paths=(path,), TRITON_INTERPRET="1", **given)


CPU = torch.device("cpu")


def make_race(record=None, *, tiny=True):
    """Return a race on a CPU."""

    def pedantic(run, setup, rounds, iterations):
        for _ in range(rounds):
            setup()
            run()

    watch = Stopwatch(CPU)
    name = "benchmarks/bench_thing.py::bench_thing"
    benchmark = SimpleNamespace(fullname=name, extra_info={}, pedantic=pedantic)
    ceilings = Ceilings(watch)
    ceilings.rates = {"matmul_float32": 1e9, "copy": 1e9}
    return Race(benchmark, watch, ceilings, record or Record({}), tiny=tiny)


def broken(*arguments, **keywords):
    raise RuntimeError("no kernel image\nmore")


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
