"""A decoder state whose step has fixed shapes, so that a CUDA graph can replay it.

Between two replacements of its tensors, everything that the host knows of a step is constant. Keys and values are
written at a position that a tensor holds; attention gets the whole capacity of the cache and, as a tensor too, how much
of it is filled. The kernels skip what lies beyond. Plain PyTorch computes it and gives it weight 0, so that on a CPU
this costs more than `DecoderState`.

Letters as in `cache`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fastformer.apps.translation.cache import DecoderState, LayerCache
from fastformer.apps.translation.model import TranslationModel
from fastformer.apps.translation.step_graph import StepGraph
from fastformer.host.devices import device_of
from fastformer.nn.multihead_attention import MultiheadAttention
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
        super().__init__(model, source, source_lengths, hypotheses)
        self.longest = longest
        device, rows = device_of(model), source_lengths.numel() * hypotheses
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        # Of all rows the same, and the number of keys that the token there reads.
        self._positions, self._key_lengths = torch.zeros_like(self._ids), torch.ones_like(self._ids)
        self._graph = StepGraph(device)
        self._reserve(min(longest, _FIRST_CAPACITY))

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
        if self.position == self.capacity:
            self._reserve(min(2 * self.capacity, self.longest))
        self._ids.copy_(ids)
        logits = self._graph.run(self._step, self.capacity - self.position)
        self.position += 1
        return logits

    def _step(self) -> Tensor:
        """Do what a graph holds: nothing here may depend on `position`, or on anything else that the host counts."""
        logits = self._logits(self._ids, self._positions, self.capacity)
        self._positions.add_(1)
        self._key_lengths.add_(1)
        return logits

    def _self_attention(self, attention: MultiheadAttention, cache: LayerCache) -> Callable[[Tensor], Tensor]:
        def attend(x: Tensor) -> Tensor:
            q, k, v = attention.queries_keys_values(x)  # [R, 1, H, K]
            cache.keys.index_copy_(2, self._positions[:1], k.transpose(1, 2))
            cache.values.index_copy_(2, self._positions[:1], v.transpose(1, 2))
            return attention.attend(q, cache.keys, cache.values, self._key_lengths)

        return attend

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only, int64, ascending."""
        super().keep(sentences)
        rows = sentences.numel() * self.hypotheses
        self._ids, self._positions, self._key_lengths = (
            x[:rows] for x in (self._ids, self._positions, self._key_lengths)
        )
        self._graph.renew(foreseen=False)

    def _reserve(self, capacity: int) -> None:
        """Have caches of this capacity, which hold what was written so far."""
        self.capacity = capacity
        for cache in self.layers:
            cache.keys, cache.values = (self._resized(x) for x in (cache.keys, cache.values))
        self._graph.renew(foreseen=True)

    def _resized(self, kept: Tensor) -> Tensor:
        # Zeros: plain attention copies keys and values that hold NaN or infinity beyond the filled ones.
        resized = kept.new_zeros(*kept.shape[:2], self.capacity, kept.shape[3])
        resized[:, :, : self.position] = kept[:, :, : self.position]
        return resized
