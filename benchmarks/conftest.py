"""The one timer of all benchmarks, and the table of ratios they end with.

CPU: process CPU time on one thread, so that a busy machine does not count. GPU: device time by CUDA events with the L2
cache flushed between repetitions, wall time in pytest-benchmark's own columns; this branch has not been run on a GPU.
Every round times the competitor and then us, in the same process, and the ratio is the median over rounds of the
ratios of the two, so a slow drift of the machine cancels. What a neighbour on the same core or memory takes away does
not cancel: the rate of a plain matrix product, measured beside each case, shows how much was there. A case is timed
only after its gate: both sides gave the same result from the same parameters; otherwise it fails as wrong.

`--enforce-goals` lets a case fail whose ratio is below its goal; without it the table says so. `--full` adds the cases
of the full-sized model where a smaller one stands for it; they take minutes on a CPU.
"""

import os

# Before torch starts OpenMP: spinning threads would burn CPU time that is then counted.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
_ROUND_SECONDS = 0.05  # shorter work is repeated within a round until it takes this long
_ROWS = pytest.StashKey[list["Row"]]()


@dataclass(frozen=True)
class Side:
    """One side of a comparison: what to run, and how many tokens a call processes (1: compare calls)."""

    name: str
    run: Callable[[], object]
    tokens: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the final table; times in seconds a call."""

    case: str
    against: str
    ours: float
    theirs: float
    ratio: float
    goal: float | None
    tokens: tuple[int, int]
    matmul_rate: float


class Stopwatch:
    """Seconds that a call takes on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "CPU time, 1 thread" if device.type == "cpu" else "CUDA events, L2 flushed"
        # Twice the 50 MB of an H100's L2, at least.
        self.flush = None if device.type == "cpu" else torch.empty(1 << 28, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], object], calls: int = 1) -> float:
        """Run `calls` times; the seconds of all together."""
        if self.flush is None:
            start = time.process_time()
            for _ in range(calls):
                run()
            return time.process_time() - start
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Race:
    """Gate first, then time."""

    def __init__(self, benchmark: Any, stopwatch: Stopwatch, rows: list[Row], enforce: bool) -> None:
        self.benchmark, self.stopwatch, self.rows, self.enforce = benchmark, stopwatch, rows, enforce
        self.device = stopwatch.device
        self.gates: dict[str, float] = {}

    def gate(self, name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
        """Fail as wrong unless |ours - theirs| <= tolerance * |theirs|, in the norm over all elements."""
        a, b = ours.detach().double(), theirs.detach().double()
        error = float((a - b).norm() / b.norm().clamp(min=1e-30)) if a.shape == b.shape else math.inf
        if not error <= tolerance:
            pytest.fail(f"wrong, not timed: {name} differs by {error:.1e}, allowed {tolerance:.0e}")
        self.gates[name] = error

    def __call__(self, case: str, ours: Side, theirs: Side, *, rounds: int, goal: float | None = None) -> None:
        """Time both sides in turn and report how much faster ours is, by the token.

        Raises:
            AssertionError: no gate was passed; or, with --enforce-goals, the ratio is below the goal.
        """
        assert self.gates, "a speed counts only after a gate"
        watch = self.stopwatch
        calls = max(1, math.ceil(_ROUND_SECONDS / max(watch(ours.run), 1e-7)))
        if calls > 1:  # longer work was warmed up by the gate
            watch(theirs.run, calls)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        rate = self._matmul_rate()
        self.benchmark.pedantic(
            lambda: times["ours"].append(watch(ours.run, calls) / calls),
            setup=lambda: times["theirs"].append(watch(theirs.run, calls) / calls),
            rounds=rounds,
            iterations=1,
        )
        speed = ours.tokens / theirs.tokens
        ratio = statistics.median(speed * b / a for a, b in zip(times["ours"], times["theirs"], strict=True))
        a, b = statistics.median(times["ours"]), statistics.median(times["theirs"])
        tokens = (ours.tokens, theirs.tokens)
        self.rows.append(Row(case, theirs.name, a, b, ratio, goal, tokens, rate))
        self.benchmark.extra_info.update(
            case=case,
            against=theirs.name,
            ratio=ratio,
            goal=goal,
            ours_seconds=times["ours"],
            theirs_seconds=times["theirs"],
            calls_per_round=calls,
            matmul_flops_per_second=rate,
            timer=watch.kind,
            gates=self.gates,
            **_versions(),
        )
        if ours.tokens > 1:
            self.benchmark.extra_info.update(tokens_per_second={"ours": ours.tokens / a, "theirs": theirs.tokens / b})
        if self.enforce and goal is not None:
            assert ratio >= goal, f"{case}: {ratio:.2f} times {theirs.name}, the goal is {goal}"

    def _matmul_rate(self) -> float:
        """Operations a second of fp32 matrix products of 1024: what the machine gives just now."""
        x = torch.randn(1024, 1024, device=self.device)
        return 2 * 1024**3 / statistics.median(self.stopwatch(lambda: x @ x) for _ in range(3))

    def note(self, **info: object) -> None:
        """Keep further numbers with the result."""
        self.benchmark.extra_info.update(info)


def flat_gradients(parameters: Iterable[Tensor]) -> Tensor:
    """The gradients of all parameters in one row, zeros where there is none."""
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


def saved_for_backward(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, the parameters themselves left out."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        address = x.untyped_storage().data_ptr()
        if address not in known:
            kept.setdefault(address, x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward()
    total = sum(x.untyped_storage().nbytes() for x in kept.values())
    del loss
    return total


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.machine()}
    if torch.cuda.is_available():
        import triton

        versions |= {
            "device": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "triton": triton.__version__,
        }
    return versions


@pytest.fixture(scope="session")
def stopwatch() -> Iterator[Stopwatch]:
    """The timer of the device that benchmarks run on: the GPU where there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Stopwatch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(threads)


@pytest.fixture
def race(benchmark: Any, stopwatch: Stopwatch, pytestconfig: pytest.Config) -> Race:
    """Compare with a competitor: gates first, then a call."""
    torch.manual_seed(0)
    rows = pytestconfig.stash.setdefault(_ROWS, [])
    return Race(benchmark, stopwatch, rows, pytestconfig.getoption("--enforce-goals"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--enforce-goals", action="store_true", help="a ratio below its goal fails")
    parser.addoption("--full", action="store_true", help="training steps of the full-sized model too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let pytest-benchmark's own columns show the same clock, and leave out what was not asked for."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.benchmark(timer=clock))
            # A case that fails its gate has said so already.
            item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))
            if "full" in item.name.replace("[", "-").replace("]", "-").split("-") and not config.getoption("--full"):
                item.add_marker(pytest.mark.skip(reason="the full-sized model takes minutes: pass --full"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    """Store versions once with the run."""
    machine_info.update(_versions())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the ratios, one line a case."""
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    write = terminalreporter.write_line
    kind = "CUDA events" if torch.cuda.is_available() else "process CPU time, one thread"
    terminalreporter.section(f"fastformer against what one would use instead ({kind})")
    slowest, fastest = (choose(row.matmul_rate for row in rows) / 1e9 for choose in (min, max))
    write(f"torch {torch.__version__}; fp32 matrix product {slowest:,.0f} to {fastest:,.0f} GFLOP/s beside the cases")
    width = max(len(row.case) for row in rows)
    other = max(len(row.against) for row in rows)
    write(f"{'case':<{width}}  {'against':<{other}}  {'ours':>14}  {'theirs':>14}  {'ratio':>6}  {'goal':>6}")
    for row in rows:
        case = f"{row.case:<{width}}  {row.against:<{other}}"
        ours, theirs = _speed(row.ours, row.tokens[0]), _speed(row.theirs, row.tokens[1])
        goal = "" if row.goal is None else f"{row.goal:g}"
        missed = "  missed" if row.goal is not None and row.ratio < row.goal else ""
        write(f"{case}  {ours:>14}  {theirs:>14}  {row.ratio:>6.2f}  {goal:>6}{missed}")


def _speed(seconds: float, tokens: int) -> str:
    if tokens > 1:
        return f"{tokens / seconds:,.{0 if tokens / seconds >= 100 else 1}f} tokens/s"
    return f"{seconds * 1e3:,.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"
