"""CUDA graphs: a whole step in one launch, for steps that wait for the host.

On one H200 with a slow virtual CPU, training steps of 6+6 layers ran 1.7 to 11 times as fast from graphs as without,
and searches of 25 tokens 2.4 to 5.2 times (`pytest benchmarks -k "training_step_graphs or (decoding and graphs)"`).
A step must read changing values from tensors at fixed addresses, and write its results to such tensors.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch

Step = Callable[[], Any]


class Recorded(NamedTuple):
    """A captured step: the function that replays it, and its output, whose tensors hold the results of a replay."""

    replay: Callable[[], object]
    output: Any


Recorder: TypeAlias = Any  # a `CudaRecorder`, or an object with its methods for another device


def capture_or_warn(recorder: Recorder, step: Step, what: str) -> Recorded | None:
    """Capture a step; if that fails, warn that `what` goes on without CUDA graphs (RuntimeWarning), and return None."""
    try:
        return recorder.capture(step)  # type: ignore[no-any-return]
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"{what} goes on without CUDA graphs, since its step was not captured: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return None


class ReplayedStep:
    """A step that a loop repeats: its first call runs it, the second captures a CUDA graph of it, others replay that.

    After a capture that failed, which gives a warning, every call runs the step.

    Args:
        recorder: None: every call runs the step.
        module: the module whose buffers the step reads. It may replace them, such as an embedding's table of positions.
        step: returns tensors, or nothing. It must not depend on numbers that the host counts.
        what: the loop, for the warning.

    Attributes:
        recorder: the argument; None after a capture that failed.
    """

    def __init__(self, recorder: Recorder | None, module: torch.nn.Module, step: Step, what: str) -> None:
        self.recorder, self._module, self._step, self._what = recorder, module, step, what
        self.reset()

    def reset(self) -> None:
        """Forget the graph, because tensors of the step were replaced."""
        self._runs = 0
        self._recorded: Recorded | None = None
        self._buffers: list[torch.Tensor] = []

    def __call__(self) -> Any:
        """Run or replay the step; return its output, which the next call may overwrite."""
        if self.recorder is None:
            return self._step()
        self._runs += 1
        if self._runs == 1:
            return self.recorder.warm_up(self._step)
        if self._recorded is None:
            self._recorded = capture_or_warn(self.recorder, self._step, self._what)
            if self._recorded is None:
                self.recorder = None
                return self._step()
            self._buffers = list(self._module.buffers())  # the graph reads these even if they are replaced
        self._recorded.replay()
        return self._recorded.output


def recorder(device: torch.device, keeps_memory: bool) -> Recorder | None:
    """Return a recorder of a device, or None if the device has no graphs; keeps_memory: see `CudaRecorder`."""
    return CudaRecorder(device, keeps_memory) if device.type == "cuda" else None


def memory_for_graphs(device: torch.device) -> int:
    """Return the memory of a device that has CUDA graphs, in bytes; 0 for a device that has none."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def release_unused_memory(index: int) -> None:
    """Return unused memory of torch's allocator to the driver if a capture may need it.

    It may if less than half of the GPU's memory is free, and the unused memory is a tenth of the GPU's or at least the
    free memory. A capture cannot return memory, nor use what deleted graphs or eager steps left in the allocator.
    """
    free, total = torch.cuda.mem_get_info(index)
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    if 2 * free < total and unused >= min(free, total / 10):
        torch.cuda.empty_cache()


class _CaptureResources:
    """A stream, for which cuBLAS keeps up to 32 MiB, and the pool of the last graph; later recorders reuse them."""

    def __init__(self, index: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self.last: torch.cuda.CUDAGraph | None = None  # keeps the pool


_idle: dict[int, list[_CaptureResources]] = {}  # by device; a recorder owns its resources while it exists
_failures: Counter[int] = Counter()  # by device


def _retire(idle: list[_CaptureResources], resources: _CaptureResources, keeps_memory: bool) -> None:
    if not keeps_memory:
        resources.last = None
    idle.append(resources)


class CudaRecorder:
    """Captures CUDA graphs on a stream of its own.

    keeps_memory: whether the memory of its graphs is kept for the next recorder after they are deleted.
    """

    def __init__(self, device: torch.device, keeps_memory: bool) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        idle = _idle.setdefault(self.index, [])
        try:
            self.resources = idle.pop()
        except IndexError:
            self.resources = _CaptureResources(self.index)
        weakref.finalize(self, _retire, idle, self.resources, keeps_memory)

    @property
    def failures(self) -> int:
        """Number of failed captures on the device; steps captured before the last failure must not run again."""
        return _failures[self.index]

    def warm_up(self, step: Step) -> Any:
        """Run a step on the stream of captures, and return its output."""
        with self._on_capture_stream():
            return step()

    def capture(self, step: Step) -> Recorded:
        """Capture a step that `warm_up` has run before, without running it.

        All graphs of a recorder share one pool of memory: a graph's tensors there, its output included, are lost when
        another graph runs. Tensors from outside keep their values.

        Raises:
            RuntimeError: the step waits for the device, or does something else that a graph cannot contain. Random
                numbers can be drawn and memory allocated as before; but graphs captured earlier on the device must not
                run any more, because they use the old state of the generator.
        """
        # If the capture runs out of memory, the pool's memory is free once the caller deletes its graphs.
        last, self.resources.last = self.resources.last, None
        release_unused_memory(self.index)
        pool, graph = torch.cuda.graph_pool_handle() if last is None else last.pool(), torch.cuda.CUDAGraph()
        with self._on_capture_stream():
            # With "global", a batch that another thread loads would end the capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                try:
                    output = step()
                except BaseException:
                    with suppress(RuntimeError):  # the capture broke off; the step's error is the reason
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._recover(pool)
                raise
        self.resources.last = graph
        return Recorded(graph.replay, output)

    def _recover(self, pool: Any) -> None:
        """After a broken capture, replace the generator, which refuses to draw, and release the graph's pool."""
        _failures[self.index] += 1
        generator = torch.cuda.default_generators[self.index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.index, pool)
            torch._C._cuda_releasePool(self.index, pool)
        # If capture_end fails early, the allocator of pinned memory is not told that the capture has ended. At each
        # allocation it then asks the driver whether the capture is active, and it refuses the pool to another capture.
        # Python cannot tell it, so the next capture must not use this pool.

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        """Work on the stream of captures, after earlier work of the current stream and before its later work."""
        # So memory freed on one stream is reused there only after the other stream has read it.
        current = torch.cuda.current_stream(self.index)
        self.resources.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.resources.stream):
                yield
        finally:
            current.wait_stream(self.resources.stream)
