"""Seconds and bytes that a call takes on a device; the only place where anything is timed.

CPU: process CPU time on one thread, so that a busy machine does not count. GPU: device time by CUDA events with the L2
cache flushed before each call, wall time of calls in a row, and device time of a CUDA graph's replay, in which the
host's launches do not count; the GPU's side is not measured on a GPU yet.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastformer.host.cuda_graphs import capture

_FLUSHED_BYTES = 1 << 28  # several times the 50 to 60 MB of a Hopper GPU's L2
_FLUSHES = 4  # takes the GPU a quarter of a millisecond, longer than the host needs to queue a short call
_WALL_CALLS, _WALL_SECONDS = 10, 0.5  # at most; of the host, so that a search, which waits for each token, runs once

Call = Callable[[], object]


class Stopwatch:
    """Seconds that calls take on a device.

    On a GPU the thread works on a stream of its own from then on: backward runs on the stream of its forward, and the
    default stream cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.kind = "CUDA events, L2 flushed" if self.on_gpu else "CPU time, 1 thread"
        self._flushed = torch.zeros(_FLUSHED_BYTES // 4, device=device) if self.on_gpu else None
        if self.on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def __call__(self, run: Call, calls: int = 1) -> float:
        """Run `calls` times; the seconds of all together."""
        if self._flushed is None:
            start = time.process_time()
            for _ in range(calls):
                run()
            return time.process_time() - start
        total = 0.0
        for _ in range(calls):
            for _ in range(_FLUSHES):  # the host queues the call meanwhile, so that short ones are not waited for
                flush(self._flushed)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            total += float(begin.elapsed_time(end)) / 1e3
        return total

    def wall(self, run: Call) -> float | None:
        """Seconds of a call by the clock on the wall, among calls one after another; on a GPU only."""
        if not self.on_gpu:
            return None
        torch.cuda.synchronize(self.device)
        start, calls = time.perf_counter(), 0
        while calls == 0 or (calls < _WALL_CALLS and time.perf_counter() - start < _WALL_SECONDS):
            run()
            calls += 1
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / calls

    def replay(self, run: Call) -> Call:
        """Capture a call as a CUDA graph, whose replay does its device work with one launch.

        Raises:
            RuntimeError: the call waits for the device, or does something else that a graph cannot hold.
        """
        for _ in range(3):  # compiles, and lets libraries allocate
            run()
        torch.cuda.synchronize(self.device)
        return capture(run, torch.cuda.current_device())[0].replay

    def peak_memory(self, run: Call) -> int | None:
        """Bytes that a call takes at its peak beyond what was allocated before, on a GPU only."""
        if not self.on_gpu:
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def flush(other: Tensor) -> None:
    """Have the L2 cache hold `other`, which is larger, and nothing of what was there.

    It is read, never written: lines that were written stay in the cache until something displaces them, which would be
    the timed call, and it would pay for their way to memory beside its own traffic. Its outputs of the call before go
    to memory here.
    """
    other.sum()


def saved_for_backward(forward: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes that are kept between forward and backward, the parameters themselves left out.

    Counted are autograd's saved tensors, and what a Function keeps as attributes of its context.
    """
    known = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        # What is kept or returned must not know x's history: an operation that saves its own output would hold it, and
        # through it itself, for ever. The training step of an encoder (d512, 6 layers) left 1.1 GB behind.
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept.setdefault(storage.data_ptr(), storage)
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    for node in _graph(out if isinstance(out, tuple) else (out,)):
        for value in getattr(node, "__dict__", {}).values():
            if isinstance(value, Tensor):
                pack(value)
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return total


def _graph(outputs: Iterable[object]) -> set[Any]:
    """All nodes that backward from these outputs passes."""
    waiting = [x.grad_fn for x in outputs if isinstance(x, Tensor)]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found
