"""Settings and fixtures of all tests."""

import gc
import os
import signal
import sys
import threading
from pathlib import Path

# Before torch is imported: idle OpenMP threads that spin cost other processes more than they save here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # A shell's job in the background ignores Ctrl-C, and so would what the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not Path("/dev/nvidiactl").exists():
    # Before Triton is imported: without a GPU its kernels run in the interpreter, and only for backend "triton".
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core. An epoch of the demo took 12.7 CPU-seconds with one thread, 16.3 with two.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import fastformer
from fastformer import functional
from fastformer.functional import choice

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=100, help="inputs that each test in tests/fuzz draws")
    parser.addoption(
        "--seed", type=int, default=0, help="what every test begins with: other random tensors, same claims"
    )
    parser.addoption("--aot", action="store_true", help="also compile the models ahead of time, for C++")
    parser.addoption("--long", action="store_true", help="also what takes long and is rarely red, which CI leaves out")
    parser.addoption("--quick", action="store_true", help="of each test its first case only, and no slow test")
    parser.addoption(
        "--compiled",
        choices=["sm_80", "sm_89", "sm_90"],
        help="only tests of kernels, with what Triton compiles for that GPU, executed on the CPU and checked",
    )


def pytest_configure(config: pytest.Config) -> None:
    if arch := config.getoption("--compiled"):
        if torch.cuda.is_available():
            raise pytest.UsageError("--compiled is for machines without a GPU")
        os.environ["TRITON_INTERPRET"] = "0"
        choice._FAULT_OF_INTERPRETER = None  # nothing is interpreted
        from tests.compiled.ptx import driver

        driver.install(int(arch.removeprefix("sm_")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the slow tests, lest one of them be what the last worker is left with; choose for an option."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    chosen = items
    if config.getoption("--compiled"):
        from tests.support.fused_op import needs_compiled, needs_kernels

        marks = (needs_compiled.mark, needs_kernels.mark)
        chosen = [item for item in chosen if any(mark in marks for mark in item.iter_markers("skipif"))]
    if not config.getoption("--long"):
        chosen = [item for item in chosen if item.get_closest_marker("long") is None]
    if config.getoption("--quick"):
        first: dict[str, pytest.Item] = {}
        for item in chosen:
            if item.get_closest_marker("slow") is None:
                first.setdefault(item.nodeid.split("[")[0], item)
        chosen = list(first.values())
    if len(chosen) < len(items):
        remaining = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Look seldom for cycles, and not among what imports left: that took a tenth of the tests' CPU-seconds."""
    gc.set_threshold(100_000, 20, 20)
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what ran compiled; of processes that `-n` starts nothing is known here."""
    if (driver := sys.modules.get("tests.compiled.ptx.driver")) and driver.session.launches:
        terminalreporter.write_line(driver.session.summary())


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """Launchers that are not interpreted repeat what they did for an earlier test, which this one may replace."""
    if plan := sys.modules.get("fastformer_kernels.host.plan"):
        plan.forget()


@pytest.fixture(autouse=True)
def _memory_for_others():
    """Give back what torch's allocator has cached: the workers share one GPU, and none can take it from another.

    Some tests need 4 to 11 GB, for the formula in fp64, and sooner or later each worker has run one of them.
    """
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def compilations():
    """Begin without compiled code; return a function that says why each compilation since then was necessary."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()
    return lambda: [metric.recompile_reason or "the first" for metric in get_compilation_metrics() if metric.is_forward]


@pytest.fixture
def triton_backend():
    """Run every op with its kernels, or raise."""
    with fastformer.backend("triton"):
        yield


@pytest.fixture
def slow_path():
    """Compare with what torch documents: its inference fast path disagrees with it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.fixture
def tokens_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every feed-forward and norm that runs."""
    seen: list[int] = []
    for name in ("feed_forward", "dropout_add_layer_norm", "layer_norm", "dropout_add_rms_norm", "rms_norm"):
        op = getattr(functional, name)

        def counted(x, *args, op=op, **kwargs):
            seen.append(x.shape[:-1].numel())
            return op(x, *args, **kwargs)

        monkeypatch.setattr(functional, name, counted)
    return seen


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """The folder of the Multi30k files; tests that need it are skipped where it is absent."""
    folder = DATA / "multi30k"
    if not folder.is_dir():
        pytest.skip(f"needs the Multi30k files in {folder}")
    return folder
