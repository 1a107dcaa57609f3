"""Races without pytest-benchmark, on a CPU."""

import torch

from benchmarks.harness.clock import Stopwatch
from benchmarks.harness.floors import Ceilings
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record
from benchmarks.harness.stand_in import benchmark_of

CPU = torch.device("cpu")


def make_race(record=None, *, tiny=True):
    watch = Stopwatch(CPU)
    benchmark = benchmark_of("benchmarks/bench_thing.py::bench_thing")
    return Race(benchmark, watch, Ceilings(watch, tiny=True), record or Record({}), enforce=False, tiny=tiny)
