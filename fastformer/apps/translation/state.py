"""The state of decoding with a translation model: unfinished hypotheses in the decoder's cache.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

import torch
from torch import Tensor

from fastformer.apps.translation.model import TranslationModel
from fastformer.host.cuda_graphs import Recorded, capture_or_warn, recorder
from fastformer.host.devices import device_of
from fastformer.nn.cache import KVCache, StaticKVCache
from fastformer.packing import Layout
from fastformer.settings import check_value

# Positions of a fixed cache at first; a full cache gets twice as many, and another graph. Not measured on a GPU.
_FIRST_CAPACITY = 64
# Steps that must remain for a capture. It costs about 1.5 eager steps, and where the device is nearly as slow as the
# host a replayed step still takes 4/5 of an eager one: 1.5 / (1 - 4/5) = 7.5. Not measured on a GPU.
_LEAST_STEPS = 8


class DecoderState:
    """A batch of unfinished hypotheses.

    Args:
        model: in evaluation mode.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        hypotheses: N, rows a sentence.

    Raises:
        RuntimeError: a layer of the decoder, or attention in it, has hooks or a class that fastformer does not know.
    """

    def __init__(self, model: TranslationModel, source: Tensor, source_lengths: Tensor, hypotheses: int = 1) -> None:
        self.model, self.hypotheses, self.position = model, hypotheses, 0
        self.cache = self._new_cache(*model.encode(source, source_lengths))

    def _new_cache(self, memory: Tensor, layout: Layout) -> KVCache:
        return self.model.decoder.new_cache(memory, memory_layout=layout, hypotheses=self.hypotheses)

    @property
    def replays(self) -> bool:
        """Whether steps may come from a CUDA graph."""
        return False

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`."""
        logits = self._logits(ids, torch.full_like(ids, self.position), self.position + 1)
        self.position += 1
        return logits

    def _logits(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """Compute the logits `[R, V]` after ids `[R]` at int64 positions `[R]`, all below `length`."""
        x = self.model.target_embedding(ids[:, None], positions[:, None], length)  # [R, 1, D]
        return self.model.logits(self.model.decoder.step(x, self.cache)[:, 0])

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]` of the same sentence; rows: int64 `[R]`."""
        self.cache.reorder(rows)

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, int64, ascending."""
        self.cache.keep(sentences)


class StaticDecoderState(DecoderState):
    """Unfinished hypotheses whose steps a CUDA graph replays: one launch a step in place of 120 (6 layers).

    The cache has a fixed capacity and holds the positions, so that each step reads the same tensors. Where tensors are
    replaced, because rows leave or the cache grows, one step runs eagerly and the next is captured. Without a CUDA
    device, and after a capture that failed, all steps run eagerly.

    Args:
        model, source, source_lengths, hypotheses: as in `DecoderState`.
        longest: the most steps that will be taken; at most what learned positions hold.

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
        self._recorder = recorder(self._ids.device, keeps_memory=True)
        self._recorded: Recorded | None = None
        self._warm = False  # kernels are compiled and libraries have allocated for the current tensors
        self._failures = 0  # of captures on the device, before this one

    def _new_cache(self, memory: Tensor, layout: Layout) -> KVCache:
        capacity = min(self.longest, _FIRST_CAPACITY)
        return self.model.decoder.new_cache(memory, memory_layout=layout, hypotheses=self.hypotheses, capacity=capacity)

    @property
    def replays(self) -> bool:
        """Whether steps may come from a CUDA graph; each number of rows needs a separate graph."""
        return self._recorder is not None

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`.

        The next step may overwrite the logits.

        Raises:
            ValueError: `longest` steps were taken.
        """
        if self.position == self.longest:
            raise ValueError(f"longest must be at least the number of steps, not {self.longest}")
        assert isinstance(self.cache, StaticKVCache)
        if self.position == self.cache.capacity:
            self.cache.grow(min(2 * self.cache.capacity, self.longest))
            self._recorded, self._warm = None, False
        self._ids.copy_(ids)
        logits = self._run(self.cache.capacity - self.position)
        self.position += 1
        return logits

    def _run(self, steps_left: int) -> Tensor:
        """Run a step, eagerly or from the graph; at most `steps_left` steps remain until tensors are replaced."""
        if self._recorder is None:
            return self._step()
        if self._recorded is not None and self._recorder.failures > self._failures:
            self._recorded = None  # a capture elsewhere failed, and replaced the generator's state
        if self._recorded is None:
            if steps_left < _LEAST_STEPS:
                return self._step()
            if not self._warm:
                self._warm = True
                warmed: Tensor = self._recorder.warm_up(self._step)
                return warmed
            self._recorded = capture_or_warn(self._recorder, self._step, "decoding")
            if self._recorded is None:
                self._recorder = None
                return self._step()
            self._failures = self._recorder.failures
        self._recorded.replay()
        output: Tensor = self._recorded.output
        return output

    def _step(self) -> Tensor:
        """Compute the step that a graph captures: it must not depend on the host's step count."""
        return self._logits(self._ids, self.cache.lengths, self.cache.capacity)

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, int64, ascending."""
        super().keep(sentences)
        self._ids = self._ids[: self.cache.rows]
        self._recorded, self._warm = None, False
