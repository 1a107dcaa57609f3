"""Time calls and count their bytes on a device; measure the machine's highest rates, which set a call's least time.

CPU: process CPU time on one thread, so that other load does not count. GPU: device time by CUDA events with the L2
cache flushed before each call, wall time of calls in sequence, and device time of a CUDA graph's replay, without the
host's launches. Events also count time in which the GPU waits for the host; graphs do not.

The least time of a call is the longer of two: its operations over the rate of a large matrix product, and the bytes
that it must move at least (each input read once, each output written once) over the bandwidth of a large copy.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastformer.host.cuda_graphs import CudaRecorder

_FLUSHED_BYTES = 1 << 28  # several times the 50 to 60 MB of a Hopper GPU's L2
# Takes an H200 1 ms, longer than the host needs to queue forward and backward of an op. With 0.25 ms, forward and
# backward of a layer norm of 83 us took 215 to 528 us by the events, which a slow virtual host had queued.
_FLUSHES = 16
_WALL_CALLS, _WALL_SECONDS = 10, 0.5  # at most; a search, which waits for each token, runs once
_REPETITIONS = 5

Call = Callable[[], object]


class Stopwatch:
    """Measures the seconds that calls take on a device.

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
        """Run `calls` times; return the seconds of all together."""
        if self._flushed is None:
            start = time.process_time()
            for _ in range(calls):
                run()
            return time.process_time() - start
        total = 0.0
        for _ in range(calls):
            # The host queues the call meanwhile. Reading writes outputs of the call before to memory, and leaves no
            # lines whose writing the timed call would pay for.
            for _ in range(_FLUSHES):
                self._flushed.sum()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            total += float(begin.elapsed_time(end)) / 1e3
        return total

    def wall(self, run: Call) -> float:
        """Return the seconds of a call by the wall clock, among calls in sequence; on a GPU only."""
        torch.cuda.synchronize(self.device)
        start, calls = time.perf_counter(), 0
        while calls == 0 or (calls < _WALL_CALLS and time.perf_counter() - start < _WALL_SECONDS):
            run()
            calls += 1
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / calls

    def replay(self, run: Call) -> Call:
        """Capture a call as a CUDA graph; return its replay, which does the device work with one launch."""
        for _ in range(3):  # compiles, and lets libraries allocate
            run()
        torch.cuda.synchronize(self.device)
        return CudaRecorder(self.device, keeps_memory=False).capture(run).replay

    def peak_memory(self, run: Call) -> int | None:
        """Return the bytes that a call allocates at its peak, on a GPU only."""
        if not self.on_gpu:
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


@dataclass(frozen=True)
class Work:
    """Least work of a call: floating-point operations of its matrix products, and bytes read and written."""

    operations: float
    bytes: float


class Ceilings:
    """Matrix-product rate by dtype, and copy bandwidth, measured at the first use."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self.rates: dict[str, float] = {}  # operations or bytes a second, by name

    def floor(self, work: Work, dtype: torch.dtype) -> float:
        """Return the seconds that this machine needs at least for the work."""
        name = f"matmul_{str(dtype).removeprefix('torch.')}"
        if name not in self.rates:
            self.rates[name] = matmul_rate(self._watch, dtype)
        if "copy" not in self.rates:
            self.rates["copy"] = copy_bandwidth(self._watch)
        return max(work.operations / self.rates[name], work.bytes / self.rates["copy"])


def copy_bandwidth(watch: Stopwatch) -> float:
    """Return the bytes a second of a copy, read and written ones."""
    size = 1 << (29 if watch.on_gpu else 27)  # beyond every cache: 1 GiB on a GPU, 256 MiB on a CPU
    source = torch.empty(size, dtype=torch.int8, device=watch.device).random_()
    target = torch.empty_like(source)
    target.copy_(source)  # its pages exist from here on
    return 2 * size / max(1e-9, statistics.median(watch(lambda: target.copy_(source)) for _ in range(_REPETITIONS)))


def matmul_rate(watch: Stopwatch, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations a second of matrix products now; fp32 without TF32, torch's default."""
    n = 512 if not watch.on_gpu else 4096 if dtype == torch.float32 else 8192
    x, y = (torch.randn(n, n, device=watch.device, dtype=dtype) for _ in range(2))
    x @ y
    return 2 * n**3 / max(1e-9, statistics.median(watch(lambda: x @ y) for _ in range(3)))


def saved_for_backward(forward: Call, parameters: Iterable[Tensor]) -> int:
    """Return the bytes that autograd keeps between forward and backward, without the parameters.

    Counts saved tensors, and tensors that a Function keeps as attributes of its context.
    """
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            storages.setdefault(storage.data_ptr(), storage)
        return x.detach()  # with its history, an operation that saves its own output would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    nodes = [x.grad_fn for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
    seen: set[Any] = set()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            for value in getattr(node, "__dict__", {}).values():
                if isinstance(value, Tensor):
                    pack(value)
    return sum(storage.nbytes() for storage in storages.values())
