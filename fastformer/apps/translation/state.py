"""The state of decoding with a translation model: unfinished hypotheses in the decoder's cache.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from fastformer.apps.translation.model import TranslationModel
from fastformer.host.cuda_graphs import Recorded, capture_or_warn, recorder


class DecoderState:
    """A batch of unfinished hypotheses; `cache` has their keys and values, and reorders them.

    With `longest`, a CUDA graph replays the steps: one launch a step in place of 120 (6 layers). The cache then has a
    fixed capacity and holds the positions, so that each step reads the same tensors. The first step, and the first one
    after rows have left, runs eagerly, and the next is captured. After a capture that failed, all steps run eagerly.

    Args:
        model: in evaluation mode.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        hypotheses: N, rows a sentence.
        longest: the most steps that will be taken, at most what learned positions hold, for CUDA graphs; None: no
            graphs.

    Raises:
        RuntimeError: a layer of the decoder, or attention in it, has hooks or a class that fastformer does not know.
        ValueError: longest is given without a CUDA device.
    """

    def __init__(
        self,
        model: TranslationModel,
        source: Tensor,
        source_lengths: Tensor,
        hypotheses: int = 1,
        longest: int | None = None,
    ) -> None:
        self.recorder = None if longest is None else recorder(source.device, keeps_memory=True)
        if longest is not None and self.recorder is None:
            raise ValueError(f"cuda_graphs has an effect only with a CUDA device, not with a {source.device.type}")
        memory, layout = model.encode(source, source_lengths)
        self.model, self.longest, self.position = model, longest, 0
        self.cache = model.decoder.new_cache(memory, memory_layout=layout, hypotheses=hypotheses, capacity=longest)
        self._ids = torch.zeros(self.cache.rows, dtype=torch.int64, device=source.device)  # that a graph reads
        self._steps = 0  # of these rows
        self._recorded: Recorded | None = None

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`.

        With `longest`, the next step may overwrite the logits, and a further step than `longest` raises ValueError.
        """
        if self.longest is None:
            logits = self._logits(ids, torch.full_like(ids, self.position), self.position + 1)
        elif self.position == self.longest:
            raise ValueError(f"longest must be at least the number of steps, not {self.longest}")
        else:
            self._ids.copy_(ids)
            logits = self._replay()
        self.position += 1
        self._steps += 1
        return logits

    def _replay(self) -> Any:
        """Compute the step after `_ids`: from a graph, unless this is the first one of these rows."""
        if self.recorder is not None and self._steps == 0:
            return self.recorder.warm_up(self._fixed_step)
        if self.recorder is not None and self._recorded is None:
            self._recorded = capture_or_warn(self.recorder, self._fixed_step, "decoding")
        if self._recorded is None:
            self.recorder = None
            return self._fixed_step()
        self._recorded.replay()
        return self._recorded.output

    def _fixed_step(self) -> Tensor:
        """Compute the step that a graph captures: it must not depend on the host's step count."""
        return self._logits(self._ids, self.cache.lengths, self.cache.capacity)

    def _logits(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """Compute the logits `[R, V]` after ids `[R]` at int64 positions `[R]`, all below `length`."""
        x = self.model.target_embedding(ids[:, None], positions[:, None], length)  # [R, 1, D]
        return self.model.logits(self.model.decoder.step(x, self.cache)[:, 0])

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, int64, ascending."""
        self.cache.keep(sentences)
        self._ids, self._steps, self._recorded = self._ids[: self.cache.rows], 0, None
