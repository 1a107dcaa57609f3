"""Marks and measures of the tests that need a GPU: `pytest -m gpu`. Skipped elsewhere, with the reason."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastformer.host.cuda_graphs import CudaRecorder, Recorded

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def peak_memory(run: Callable[[], object]) -> int:
    """Return the peak memory of `run` in bytes, beyond what is allocated before; the first of two runs compiles."""
    run()
    # The thread in which autograd runs backward lets go of results after they are returned, and before its next task.
    torch.ones((), device="cuda", requires_grad=True).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], list[Tensor]]) -> tuple[Callable[[], object], list[Tensor]]:
    """Capture a step: return a function that replays it, and the tensors that hold its results.

    Where the step cannot be captured, its own error is raised, and the process can still draw random numbers.
    """
    recorder = CudaRecorder(torch.device("cuda"), keeps_memory=True)
    for _ in range(3):  # compiles kernels, and makes the libraries allocate what they need
        recorder.warm_up(step)
    torch.cuda.synchronize()
    replay, results = recorder.capture(step)
    return replay, results


def counted_captures(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Return a list that collects every capture that does not fail."""
    seen: list[Recorded] = []
    capture = CudaRecorder.capture

    def count(self: CudaRecorder, step: Callable[[], object]) -> Recorded:
        recorded = capture(self, step)
        seen.append(recorded)
        return recorded

    monkeypatch.setattr(CudaRecorder, "capture", count)
    return seen
