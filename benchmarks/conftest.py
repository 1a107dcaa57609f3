"""Options, fixtures and the final table of the benchmarks: `pytest benchmarks --benchmark-only`.

Cases that need a GPU are skipped without one.
"""

import os

# Before torch starts OpenMP: spinning threads would burn CPU time that is then counted.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.competitors.known import NEEDS_GPU
from benchmarks.harness import environment
from benchmarks.harness.clock import Ceilings, Stopwatch
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record
from benchmarks.tables import whole_table

HERE = Path(__file__).parent
_CPU_SECONDS, _QUICK_SECONDS = 6.0, 0.3  # of the rounds of a case on a CPU, unless --full
_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("fastformer").addoption
    add("--full", action="store_true", help="full sizes and all rounds on a CPU too, where they take minutes")
    add("--record", metavar="FILE", type=Path, help="write each result there (JSON lines) as it is measured")
    add("--profile", metavar="DIR", type=Path, help="write a profile of a call of each case there")
    add("--dry-run", action="store_true", help="check all code on a CPU, tiny shapes; needs TRITON_INTERPRET=1")


def pytest_configure(config: pytest.Config) -> None:
    try:
        if config.getoption("--record") is not None:
            environment.commit()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("--dry-run") and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("--dry-run runs kernels in Triton's interpreter: set TRITON_INTERPRET=1")


@pytest.fixture(scope="session")
def stopwatch(pytestconfig: pytest.Config) -> Iterator[Stopwatch]:
    """Return the timer of the device: the GPU if there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and not pytestconfig.getoption("--dry-run")
    yield Stopwatch(torch.device("cuda" if on_gpu else "cpu"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def session(stopwatch: Stopwatch, pytestconfig: pytest.Config) -> Iterator[tuple[Stopwatch, Ceilings, Record]]:
    """Return the timer, the highest rates of the machine, and the results of this run."""
    path, ceilings = pytestconfig.getoption("--record"), Ceilings(stopwatch)
    record = Record({} if path is None else environment.facts(stopwatch.device), path)
    pytestconfig.stash[_RECORD] = record
    yield stopwatch, ceilings, record
    record.close(ceilings.rates)


@pytest.fixture
def race(request: pytest.FixtureRequest, benchmark: Any, session: tuple[Stopwatch, Ceilings, Record]) -> Race:
    """Compare with a competitor: gates first, then a call."""
    torch.manual_seed(0)
    option = request.config.getoption
    seconds = math.inf if option("--full") else _QUICK_SECONDS if "quick" in request.node.name else _CPU_SECONDS
    return Race(benchmark, *session, tiny=option("--dry-run"), seconds=seconds, profiles=option("--profile"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of the other device, and give pytest-benchmark's own columns the same clock.

    Cases marked `cpu` have shapes for a CPU and are left out on a GPU. On a GPU `-k quick` includes "usual" sizes.
    """
    gpu, dry = torch.cuda.is_available(), bool(config.getoption("--dry-run"))
    cases = [item for item in items if item.path.is_relative_to(HERE)]
    left_out = [item for item in cases if (gpu or dry) and item.get_closest_marker("cpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in cases:
        item.add_marker(pytest.mark.benchmark(timer=time.perf_counter if gpu else time.process_time))
        # A warning of a competitor (as Inductor's about TF32) is no error; a case that fails its gate reports it.
        item.add_marker(pytest.mark.filterwarnings("default"))
        # Where a graph is not captured, eager steps would be timed.
        item.add_marker(pytest.mark.filterwarnings("error:.* goes on without CUDA graphs:RuntimeWarning"))
        # torch warns of its own encoder: that its nested-tensor path is off, or that it is a prototype.
        for message in ("Benchmark fixture was not used", ".*nested.?tensor.*"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))
        size = item.callspec.params.get("size") if hasattr(item, "callspec") else None
        if gpu or dry:
            item.extra_keyword_matches |= {"quick"} if size == "usual" else set()
        elif item.get_closest_marker("gpu") and not item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
        elif size == "full" and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="the full size takes minutes on a CPU: pass --full"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the ratios, one line a case."""
    record = config.stash.get(_RECORD, None)
    if record is not None and record.rows:
        terminalreporter.section("fastformer against what one would use instead")
        if config.getoption("--dry-run"):
            terminalreporter.write_line("A dry run: tiny shapes, kernels in the interpreter. Nothing was timed.")
        terminalreporter.write_line(whole_table(record.rows))
