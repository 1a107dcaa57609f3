"""A decoder state whose step has fixed shapes, so that a CUDA graph can replay it.

Between two replacements of its tensors, everything that the host knows of a step is constant: the decoder's cache is of
fixed capacity (`fastformer.nn.static_cache`, which says what that costs), and positions come from its lengths.

Letters as in `cache`.
"""

import torch
from torch import Tensor

from fastformer.apps.translation.model import TranslationModel
from fastformer.apps.translation.state import DecoderState
from fastformer.apps.translation.step_graph import StepGraph
from fastformer.host.devices import device_of
from fastformer.nn.cache import KVCache
from fastformer.nn.static_cache import StaticKVCache
from fastformer.packing import Layout
from fastformer.settings import check_value

# Positions of a cache at first; when they are full there are twice as many, and another graph. Not measured on a GPU.
_FIRST_CAPACITY = 64


class StaticDecoderState(DecoderState):
    """A batch of hypotheses in progress, whose steps come from a CUDA graph where there is one.

    Args:
        model, source, source_lengths, hypotheses: as in `DecoderState`.
        longest: the most steps that will be taken; not beyond what learned positions hold.

    Raises:
        ValueError: longest is below 1.
    """

    def __init__(
        self, model: TranslationModel, source: Tensor, source_lengths: Tensor, hypotheses: int = 1, *, longest: int
    ) -> None:
        check_value("longest", longest, int, at_least=1)
        self.longest = longest
        super().__init__(model, source, source_lengths, hypotheses)
        self._ids = torch.zeros(self.cache.rows, dtype=torch.int64, device=device_of(model))
        self._graph = StepGraph(device_of(model))

    def _new_cache(self, memory: Tensor, layout: Layout) -> KVCache:
        capacity = min(self.longest, _FIRST_CAPACITY)
        return self.model.decoder.new_cache(memory, memory_layout=layout, hypotheses=self.hypotheses, capacity=capacity)

    @property
    def replays(self) -> bool:
        """Whether steps may come from a CUDA graph, of which each number of rows needs its own."""
        return self._graph.replays

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`.

        The next step may overwrite them.

        Raises:
            ValueError: there were `longest` steps already.
        """
        if self.position == self.longest:
            raise ValueError(f"longest must be at least the number of steps, not {self.longest}")
        assert isinstance(self.cache, StaticKVCache)
        capacity = self.cache.capacity
        if self.position == capacity:
            capacity = min(2 * capacity, self.longest)
            self.cache.grow(capacity)
            self._graph.renew(foreseen=True)
        self._ids.copy_(ids)
        logits = self._graph.run(self._step, capacity - self.position)
        self.position += 1
        return logits

    def _step(self) -> Tensor:
        """Do what a graph holds: nothing here may depend on `position`, or on anything else that the host counts."""
        return self._logits(self._ids, self.cache.lengths, self.cache.capacity)

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only, int64, ascending."""
        super().keep(sentences)
        self._ids = self._ids[: self.cache.rows]
        self._graph.renew(foreseen=False)
