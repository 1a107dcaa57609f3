"""A decoding step as a CUDA graph: one launch in place of 120 (6 layers), where the host is what a step waits for.

A graph repeats launches as they were recorded: the same kernels, the same memory, the same numbers. So a step must read
what changes from tensors that stay where they are, and leave its result in one; `static_cache` has such a step. When
its tensors are replaced, because rows leave or the cache grows, the graph is of no use, and another one is captured.

When a capture pays. Let an eager step take e, a replay r, and a capture c: the host goes through the step once more
without a device that computes, c = e, and the graph is made ready, taken as e / 2 (a guess; none of this is measured on
a GPU). From n = c / (e - r) steps on a capture is cheaper than none:

- At batch 1 the host decides: r is some e / 4, n = 2.
- Where the device is nearly as slow as the host, r = 4/5 e, n = 7.5. No capture is made for fewer than 8 steps that are
  known to remain.
- Rows leave at steps that nobody knows before. After that, two steps run eagerly before the next capture: who rents as
  long as it takes to have paid the price never pays more than twice the least (the ski-rental rule). The first graph,
  and that of a cache that has grown, wait one step only, which compiles kernels and lets libraries allocate. Those are
  steps like others: their results are used.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Step = Callable[[], Tensor]

_LEAST_STEPS = 8
_FIRST_WAIT, _NEXT_WAIT = 1, 2


class Recorded(NamedTuple):
    """A step that was captured: what repeats it, and the tensor that then holds its result."""

    replay: Callable[[], object]
    output: Tensor


class Recorder(Protocol):
    """What captures a step."""

    def warm_up(self, step: Step) -> Tensor:
        """Run a step where it will be captured."""

    def capture(self, step: Step) -> Recorded:
        """Capture a step without running it; RuntimeError where it cannot be."""


class StepGraph:
    """Runs one step after another: eagerly, or from a graph once that pays.

    Args:
        device: graphs need a CUDA device; on others every step is eager.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorder = recorder(device)
        self._recorded: Recorded | None = None
        self._wait = _FIRST_WAIT

    @property
    def replays(self) -> bool:
        """Whether steps may come from a graph: not without a CUDA device, nor after a capture that failed."""
        return self._recorder is not None

    def run(self, step: Step, steps_left: int) -> Tensor:
        """Run a step, and return its result, which the next one may overwrite.

        Where it cannot be captured, a RuntimeWarning says why, and this and all later steps are eager.

        Args:
            step: reads and writes the same tensors each time, until `renew`.
            steps_left: how many steps there are at most, this one too, until `renew` or the end.
        """
        if self._recorded is None:
            if self._recorder is None or steps_left < _LEAST_STEPS:
                return step()
            if self._wait:
                self._wait -= 1
                return self._recorder.warm_up(step)
            try:
                self._recorded = self._recorder.capture(step)
            except RuntimeError as error:
                self._recorder = None
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(
                    f"decoding goes on without CUDA graphs, since its step was not captured: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return step()
        self._recorded.replay()
        return self._recorded.output

    def renew(self, foreseen: bool) -> None:
        """Forget the graph, as its tensors are replaced; foreseen: not to be again before the steps that are left."""
        self._recorded = None
        self._wait = _FIRST_WAIT if foreseen else _NEXT_WAIT


def recorder(device: torch.device) -> Recorder | None:
    """Return what captures steps on a device, or None where nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


class _Home:
    """What captures one after another share, by way of `_idle`: a stream, and the pool of the last graph.

    cuBLAS keeps a workspace of up to 32 MiB for each stream that it meets, and memory that a graph's pool has taken
    from the driver goes to no other pool before the driver has none left.
    """

    def __init__(self, index: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self.last: torch.cuda.CUDAGraph | None = None  # keeps the pool


_idle: dict[int, list[_Home]] = {}  # by device; what a recorder has is its own for as long as it lives


class CudaRecorder:
    """Captures CUDA graphs as torch's notes describe it, on a stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        idle = _idle.setdefault(self.index, [])
        try:
            self.home = idle.pop()
        except IndexError:
            self.home = _Home(self.index)
        weakref.finalize(self, idle.append, self.home)

    def warm_up(self, step: Step) -> Tensor:
        """Run a step on the stream that it will be captured on."""
        with self._beside():
            return step()

    def capture(self, step: Step) -> Recorded:
        """Capture a step without running it; those captured before must not run any more.

        Raises:
            RuntimeError: it waits for the device, or does something else that a graph cannot hold; random numbers can
                be drawn and memory allocated as before.
        """
        graph, last = torch.cuda.CUDAGraph(), self.home.last
        pool = torch.cuda.graph_pool_handle() if last is None else last.pool()
        with self._beside():
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
                generator = torch.cuda.default_generators[self.index]
                generator.graphsafe_set_state(generator.clone_state())
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.index, pool)
                    torch._C._cuda_releasePool(self.index, pool)
                raise
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
