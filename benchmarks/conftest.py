"""Options, fixtures and the final table of the benchmarks: `pytest benchmarks --benchmark-only`.

What is timed and how is in `clock`, what a comparison is in `race`. Without a GPU the cases that need one are skipped.
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

from benchmarks.competitors import known
from benchmarks.harness import environment, stand_in, terminal
from benchmarks.harness.clock import Stopwatch
from benchmarks.harness.floors import Ceilings
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record

HERE = Path(__file__).parent
_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastformer")
    group.addoption("--enforce-goals", action="store_true", help="a ratio below its goal fails")
    group.addoption(
        "--full", action="store_true", help="the full sizes too, which take minutes on a CPU; a GPU has them"
    )
    group.addoption("--competitor", metavar="NAMES", help="only these: " + ", ".join(known.COMPETITORS))
    group.addoption("--record", metavar="FILE", type=Path, help="write each result there (JSON lines) when it exists")
    group.addoption(
        "--dry-run", action="store_true", help="prove all code on a CPU with tiny shapes; needs TRITON_INTERPRET=1"
    )


def pytest_configure(config: pytest.Config) -> None:
    stand_in.install(config)
    names = config.getoption("--competitor")
    if names is not None:
        try:
            known.chosen(names)
        except ValueError as error:
            raise pytest.UsageError(f"--competitor: {error}") from None
    if config.getoption("--record") is not None:
        try:
            environment.commit()
        except ValueError as error:
            raise pytest.UsageError(f"--record: {error}") from None
    if config.getoption("--dry-run") and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("--dry-run runs kernels in Triton's interpreter: set TRITON_INTERPRET=1")


def _device(config: pytest.Config) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not config.getoption("--dry-run") else "cpu")


@pytest.fixture(scope="session")
def stopwatch(pytestconfig: pytest.Config) -> Iterator[Stopwatch]:
    """The timer of the device that benchmarks run on: the GPU where there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Stopwatch(_device(pytestconfig))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ceilings(stopwatch: Stopwatch, pytestconfig: pytest.Config) -> Ceilings:
    """What the machine does at most, measured in this run."""
    return Ceilings(stopwatch, tiny=bool(pytestconfig.getoption("--dry-run")))


@pytest.fixture(scope="session")
def record(stopwatch: Stopwatch, ceilings: Ceilings, pytestconfig: pytest.Config) -> Iterator[Record]:
    """The results of this run."""
    path = pytestconfig.getoption("--record")
    record = Record({} if path is None else environment.facts(stopwatch.device), path)
    pytestconfig.stash[_RECORD] = record
    yield record
    record.close(ceilings.measured())


@pytest.fixture
def race(benchmark: Any, stopwatch: Stopwatch, ceilings: Ceilings, record: Record, pytestconfig: pytest.Config) -> Race:
    """Compare with a competitor: gates first, then a call."""
    torch.manual_seed(0)
    enforce, tiny = (bool(pytestconfig.getoption(name)) for name in ("--enforce-goals", "--dry-run"))
    return Race(benchmark, stopwatch, ceilings, record, enforce=enforce, tiny=tiny)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest-benchmark's own columns show the same clock, and leave out what was not asked for.

    A case marked `cpu` has its shapes for a CPU and is left out elsewhere. A size is the parameter `size` or begins the
    name of a shape; "usual" ones take a CPU minutes, and are quick on a GPU, where `-k quick` has them too.
    """
    gpu, dry = torch.cuda.is_available(), bool(config.getoption("--dry-run"))
    clock = time.perf_counter if gpu else time.process_time
    names = config.getoption("--competitor")
    wanted = None if names is None else known.chosen(names)
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    left = [item for item in ours if wanted is not None and _parameter(item, "competitor") not in wanted]
    if gpu or dry:
        left += [item for item in ours if item.get_closest_marker("cpu") and item not in left]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    for item in (each for each in ours if each not in left):
        item.add_marker(pytest.mark.benchmark(timer=clock))
        # A warning of a competitor (as Inductor's about TF32) is no error; a case that fails its gate has said so.
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))
        if gpu or dry:
            item.extra_keyword_matches |= {"quick"} if _parameter(item, "size") == "usual" else set()
        elif item.get_closest_marker("gpu") and not item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=known.NEEDS_GPU))
        elif _parameter(item, "size") == "full" and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="the full size takes minutes on a CPU: pass --full"))


def _parameter(item: pytest.Item, name: str) -> object:
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the ratios, one line a case."""
    record = config.stash.get(_RECORD, None)
    write = terminalreporter.write_line
    if record is not None and record.rows:
        rows = record.rows
        kind = "CUDA events" if _device(config).type == "cuda" else "process CPU time, one thread"
        terminalreporter.section(f"fastformer against what one would use instead ({kind})")
        if config.getoption("--dry-run"):
            write("A dry run: tiny shapes, one round, kernels in the interpreter. No figure of it means anything.")
        rates = [row.matmul_rate / 1e9 for row in rows if not math.isnan(row.matmul_rate)]
        if rates:
            write(
                f"torch {torch.__version__}; fp32 matrix product {min(rates):,.0f} to {max(rates):,.0f} GFLOP/s beside "
                "the cases"
            )
        for line in terminal.table(rows):
            write(line)
    skipped = sum(_needs_gpu(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        write(f"{skipped} cases need a CUDA device and were skipped")


def _needs_gpu(report: pytest.TestReport) -> bool:
    """Whether a skipped case, or its competitor, was skipped for want of a GPU."""
    return isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(known.NEEDS_GPU)
