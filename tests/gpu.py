"""Marks and measures of the tests that need a GPU: `pytest -m gpu`. Skipped elsewhere, with the reason."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes that `run` takes at its peak, beyond what is there before; run twice, as the first time compiles."""
    run()
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


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Capture a step as torch's notes on CUDA graphs describe it: what it returns holds the results of each replay.

    Where the step cannot be captured, its own error is raised, and the process can still draw random numbers.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles kernels, and makes the libraries allocate what they need
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            results = step()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            # A capture that breaks off leaves the generator refusing to draw.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results
