"""A decoding step as a CUDA graph: one launch in place of 120 (6 layers), where the host is what a step waits for.

`static_state` has a step that a graph can hold. When its tensors are replaced, because rows leave or the cache grows,
the graph is of no use, and another one is captured.

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

from collections.abc import Callable

import torch
from torch import Tensor

from fastformer.host.cuda_graphs import Recorded, capture_or_warn, recorder

_LEAST_STEPS = 8
_FIRST_WAIT, _NEXT_WAIT = 1, 2


class StepGraph:
    """Runs one step after another: eagerly, or from a graph once that pays.

    Args:
        device: graphs need a CUDA device; on others every step is eager.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorder = recorder(device, keeps_memory=True)
        self._recorded: Recorded | None = None
        self._failures = 0  # of captures, before this one
        self._wait = _FIRST_WAIT

    @property
    def replays(self) -> bool:
        """Whether steps may come from a graph: not without a CUDA device, nor after a capture that failed."""
        return self._recorder is not None

    def run(self, step: Callable[[], Tensor], steps_left: int) -> Tensor:
        """Run a step, and return its result, which the next one may overwrite.

        Where it cannot be captured, a RuntimeWarning says why, and this and all later steps are eager.

        Args:
            step: reads and writes the same tensors each time, until `renew`.
            steps_left: how many steps there are at most, this one too, until `renew` or the end.
        """
        if self._recorded is not None and self._recorder is not None and self._recorder.failures > self._failures:
            self._recorded = None
        if self._recorded is None:
            if self._recorder is None or steps_left < _LEAST_STEPS:
                return step()
            if self._wait:
                self._wait -= 1
                warmed: Tensor = self._recorder.warm_up(step)
                return warmed
            self._recorded = capture_or_warn(self._recorder, step, "decoding")
            if self._recorded is None:
                self._recorder = None
                return step()
            self._failures = self._recorder.failures
        self._recorded.replay()
        output: Tensor = self._recorded.output
        return output

    def renew(self, foreseen: bool) -> None:
        """Forget the graph, as its tensors are replaced; foreseen: not to be again before the steps that are left."""
        self._recorded = None
        self._wait = _FIRST_WAIT if foreseen else _NEXT_WAIT
