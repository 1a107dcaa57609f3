"""CUDA graphs: a step that is launched whole, where the host is what it waits for.

A graph repeats launches as they were recorded: the same kernels, the same memory, the same numbers. So a step must read
what changes from tensors that stay where they are, and leave its results in such tensors.

Not measured on a GPU.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch

Step = Callable[[], Any]


class Recorded(NamedTuple):
    """A step that was captured: what repeats it, and what it returned, whose tensors then hold the results."""

    replay: Callable[[], object]
    output: Any


class Recorder(Protocol):
    """What captures steps."""

    @property
    def failures(self) -> int:
        """Captures that failed so far, of all recorders of the device; what was captured before must not run again."""

    def warm_up(self, step: Step) -> Any:
        """Run a step where it will be captured, and return what it returns."""

    def capture(self, step: Step) -> Recorded:
        """Capture a step without running it; RuntimeError where it cannot be."""


def capture_or_warn(recorder: Recorder, step: Step, what: str) -> Recorded | None:
    """Capture a step; None where it cannot be, after a RuntimeWarning with the reason.

    Args:
        recorder: that captures.
        step: what is captured.
        what: goes on without CUDA graphs then.
    """
    try:
        return recorder.capture(step)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"{what} goes on without CUDA graphs, since its step was not captured: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return None


def capture(step: Step, index: int, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a step on the current stream, which must not be the default one: the graph, and what the step returned.

    Where that fails, its own error is raised, random numbers can be drawn and memory allocated as before. But graphs
    that were captured before must not run any more: the generator has another state, and theirs still is of a capture.

    Args:
        step: has run there before, so that kernels are compiled and libraries have allocated.
        index: of the current device.
        pool: of an earlier graph, whose memory may be taken; None: a new one.
    """
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # Other threads may do as they like: with "global", a batch that one of them loads ends the capture.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        try:
            output = step()
        except BaseException:
            with suppress(RuntimeError):  # that it broke off; why is what the step raised
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        # A capture that breaks off leaves the generator refusing to draw, the allocator in the graph's pool.
        _failures[index] += 1
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        # Where the end fails before it comes to that, the allocator of pinned memory goes on asking whether the capture
        # is on, a question to the driver an allocation, and refuses this pool to another capture; Python has no call
        # that ends it. So whoever captures again must not give this pool.
        raise
    return graph, output


def recorder(device: torch.device, keeps_memory: bool) -> Recorder | None:
    """Return what captures steps on a device, or None where nothing can; keeps_memory: see `CudaRecorder`."""
    return CudaRecorder(device, keeps_memory) if device.type == "cuda" else None


class _Home:
    """What captures one after another share, by way of `_idle`: a stream, and the pool of the last graph.

    cuBLAS keeps a workspace of up to 32 MiB for each stream that it meets, and memory that a graph's pool has taken
    from the driver goes to nobody else as long as a graph of that pool lives.
    """

    def __init__(self, index: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self.last: torch.cuda.CUDAGraph | None = None  # keeps the pool


_idle: dict[int, list[_Home]] = {}  # by device; what a recorder has is its own for as long as it lives
_failures: Counter[int] = Counter()  # by device


def _retire(idle: list[_Home], home: _Home, keeps_memory: bool) -> None:
    if not keeps_memory:
        home.last = None
    idle.append(home)


class CudaRecorder:
    """Captures CUDA graphs as torch's notes describe it, on a stream beside the current one.

    Args:
        device: a CUDA device.
        keeps_memory: what its graphs have taken is kept for the next recorder, when this one and they are no more.
    """

    def __init__(self, device: torch.device, keeps_memory: bool) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        idle = _idle.setdefault(self.index, [])
        try:
            self.home = idle.pop()
        except IndexError:
            self.home = _Home(self.index)
        weakref.finalize(self, _retire, idle, self.home, keeps_memory)

    @property
    def failures(self) -> int:
        """Captures that failed so far, of all recorders of the device; what was captured before must not run again."""
        return _failures[self.index]

    def warm_up(self, step: Step) -> Any:
        """Run a step on the stream that it will be captured on."""
        with self._beside():
            return step()

    def capture(self, step: Step) -> Recorded:
        """Capture a step without running it.

        All that a recorder captures shares one pool of memory: what a graph leaves there, its output too, is lost when
        another one runs. Tensors from outside keep their values.

        Raises:
            RuntimeError: it waits for the device, or does something else that a graph cannot hold; random numbers can
                be drawn and memory allocated as before.
        """
        # Where the capture fails for want of memory, that of the pool is free once the caller drops its graphs.
        last, self.home.last = self.home.last, None
        with self._beside():
            graph, output = capture(step, self.index, None if last is None else last.pool())
        self.home.last = graph
        return Recorded(graph.replay, output)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on the stream of captures, after what the current one was given and before what it will be given."""
        # So what is freed on one of them is taken again on the same only after the other has read it.
        current = torch.cuda.current_stream(self.index)
        self.home.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.home.stream):
                yield
        finally:
            current.wait_stream(self.home.stream)
