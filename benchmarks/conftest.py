"""Options, fixtures and the final table of the benchmarks: `pytest benchmarks --benchmark-only`.

Cases that need a GPU are skipped without one.
"""

import os

# Before torch starts OpenMP: spinning threads would burn CPU time that is then counted.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.competitors import known
from benchmarks.harness import environment
from benchmarks.harness.clock import Ceilings, Stopwatch
from benchmarks.harness.race import Race
from benchmarks.harness.record import Record, Row

HERE = Path(__file__).parent
_CPU_SECONDS, _QUICK_SECONDS = 6.0, 2.0  # of the rounds of a case on a CPU, unless --full
_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastformer")
    group.addoption("--enforce-goals", action="store_true", help="fail if a ratio is below its goal")
    group.addoption(
        "--full", action="store_true", help="full sizes and all rounds on a CPU too, where they take minutes"
    )
    group.addoption("--competitor", metavar="NAMES", help="only these: " + ", ".join(known.COMPETITORS))
    group.addoption(
        "--record", metavar="FILE", type=Path, help="write each result there (JSON lines) as it is measured"
    )
    group.addoption("--profile", metavar="DIR", type=Path, help="write a profile of a call of each case there")
    group.addoption(
        "--dry-run", action="store_true", help="check all code on a CPU, tiny shapes; needs TRITON_INTERPRET=1"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        if config.getoption("--competitor") is not None:
            known.chosen(config.getoption("--competitor"))
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
def ceilings(stopwatch: Stopwatch) -> Ceilings:
    """Return the highest rates of the machine, measured in this run."""
    return Ceilings(stopwatch)


@pytest.fixture(scope="session")
def record(stopwatch: Stopwatch, ceilings: Ceilings, pytestconfig: pytest.Config) -> Iterator[Record]:
    """Return the results of this run."""
    path = pytestconfig.getoption("--record")
    record = Record({} if path is None else environment.facts(stopwatch.device), path)
    pytestconfig.stash[_RECORD] = record
    yield record
    record.close(ceilings.measured())


@pytest.fixture
def race(
    request: pytest.FixtureRequest, benchmark: Any, stopwatch: Stopwatch, ceilings: Ceilings, record: Record
) -> Race:
    """Compare with a competitor: gates first, then a call."""
    torch.manual_seed(0)
    enforce, tiny = (bool(request.config.getoption(name)) for name in ("--enforce-goals", "--dry-run"))
    seconds = _QUICK_SECONDS if "quick" in request.node.name else _CPU_SECONDS
    seconds = math.inf if request.config.getoption("--full") else seconds
    profiles = request.config.getoption("--profile")
    return Race(benchmark, stopwatch, ceilings, record, enforce=enforce, tiny=tiny, seconds=seconds, profiles=profiles)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that were not asked for, and give pytest-benchmark's own columns the same clock.

    Cases marked `cpu` have shapes for a CPU and are left out on a GPU. The size of a case is its parameter `size`, or
    the beginning of the name of a shape. "usual" sizes take minutes on a CPU; on a GPU `-k quick` includes them.
    """
    gpu, dry = torch.cuda.is_available(), bool(config.getoption("--dry-run"))
    names = config.getoption("--competitor")
    competitors = None if names is None else known.chosen(names)
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    left_out = [item for item in ours if competitors is not None and _parameter(item, "competitor") not in competitors]
    if gpu or dry:
        left_out += [item for item in ours if item.get_closest_marker("cpu") and item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in (each for each in ours if each not in left_out):
        item.add_marker(pytest.mark.benchmark(timer=time.perf_counter if gpu else time.process_time))
        # A warning of a competitor (as Inductor's about TF32) is no error; a case that fails its gate reports it.
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))
        size = _parameter(item, "size")
        if gpu or dry:
            item.extra_keyword_matches |= {"quick"} if size == "usual" else set()
        elif item.get_closest_marker("gpu") and not item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=known.NEEDS_GPU))
        elif size == "full" and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="the full size takes minutes on a CPU: pass --full"))


def _parameter(item: pytest.Item, name: str) -> object:
    return item.callspec.params.get(name) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the ratios, one line a case."""
    record = config.stash.get(_RECORD, None)
    write = terminalreporter.write_line
    if record is not None and record.rows:
        terminalreporter.section("fastformer against what one would use instead")
        if config.getoption("--dry-run"):
            write("A dry run: tiny shapes, kernels in the interpreter. Nothing was timed.")
        rates = [row.matmul_rate / 1e9 for row in record.rows if row.matmul_rate is not None]
        if rates:
            said = f"fp32 matrix product {min(rates):,.0f} to {max(rates):,.0f} GFLOP/s beside the cases"
            write(f"torch {torch.__version__}; {said}")
        for line in table(record.rows):
            write(line)
    skipped = sum(_needs_gpu(report) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        write(f"{skipped} cases need a CUDA device and were skipped")


def _needs_gpu(report: pytest.TestReport) -> bool:
    """Return whether a case, or its competitor, was skipped because it needs a GPU."""
    return isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(known.NEEDS_GPU)


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row: the speeds of both sides, ratio, goal, share of the floor, memory and status."""
    lines: list[tuple[str, ...]] = [
        ("case", "against", "ours", "theirs", "ratio", "goal", "floor", "memory, ours / theirs", "")
    ]
    for row in rows:
        status = "missed" if row.missed else "" if row.status in ("measured", "dry run") else row.status
        speeds = (_speed(seconds, tokens) for seconds, tokens in zip((row.ours, row.theirs), row.tokens, strict=True))
        ratio, goal = ("" if value is None else f"{value:.4g}" for value in (row.ratio, row.goal))
        floor = "" if row.floor is None else f"{row.floor:.0%}"
        lines.append((row.case, row.against, *speeds, ratio, goal, floor, _memory(row), status))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _speed(seconds: float | None, tokens: int) -> str:
    if seconds is None:
        return "-"
    return f"{tokens / seconds:,.0f} tokens/s" if tokens > 1 else f"{seconds * 1e3:,.3f} ms"


def _memory(row: Row) -> str:
    """Return the peak of a call if it is known (on a GPU), else the bytes saved for backward."""
    kind, pair = ("peak", row.peak_bytes) if row.peak_bytes is not None else ("saved", row.saved_bytes)
    return "" if pair is None else f"{kind} {pair[0] / 1e6:,.1f} / {pair[1] / 1e6:,.1f} MB"
