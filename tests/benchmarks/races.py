"""Races on a CPU without pytest-benchmark, and the benchmarks in a process of their own."""

import subprocess
from types import SimpleNamespace

import torch

from benchmarks.harness.clock import Ceilings, Stopwatch
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record
from tests.support.python import python

CPU = torch.device("cpu")


def make_race(record=None, *, tiny=True):
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


def pytest_benchmarks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "pytest", "-p", "no:cacheprovider", *arguments, **environment)
