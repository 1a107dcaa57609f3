"""Races without pytest-benchmark, on a CPU, and the benchmarks in a process of their own."""

import subprocess

import torch

from benchmarks.harness.clock import Stopwatch
from benchmarks.harness.floors import Ceilings
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record
from benchmarks.harness.stand_in import benchmark_of
from tests.support.python import python

CPU = torch.device("cpu")


def make_race(record=None, *, tiny=True):
    watch = Stopwatch(CPU)
    benchmark = benchmark_of("benchmarks/bench_thing.py::bench_thing")
    return Race(benchmark, watch, Ceilings(watch, tiny=True), record or Record({}), enforce=False, tiny=tiny)


def broken(*arguments, **keywords):
    raise RuntimeError("no kernel image\nmore")


def pytest_benchmarks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "pytest", "-p", "no:cacheprovider", *arguments, **environment)
