"""Hypotheses in progress: what a translation model has written of each, in the cache of its decoder.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

import torch
from torch import Tensor

from fastformer.apps.translation.model import TranslationModel
from fastformer.nn.cache import KVCache
from fastformer.packing import Layout


class DecoderState:
    """A batch of hypotheses in progress.

    Args:
        model: in evaluation mode.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        hypotheses: N, rows a sentence.

    Raises:
        RuntimeError: a layer of the decoder, or attention in it, has hooks or is somebody's own.
    """

    def __init__(self, model: TranslationModel, source: Tensor, source_lengths: Tensor, hypotheses: int = 1) -> None:
        self.model, self.hypotheses, self.position = model, hypotheses, 0
        self.cache = self._new_cache(*model.encode(source, source_lengths))

    def _new_cache(self, memory: Tensor, layout: Layout) -> KVCache:
        return self.model.decoder.new_cache(memory, memory_layout=layout, hypotheses=self.hypotheses)

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
        """Let row i carry on from row `rows[i]`, int64 `[R]`, within the same sentence."""
        self.cache.reorder(rows)

    def keep(self, sentences: Tensor) -> None:
        """Go on with these sentences only, int64, ascending."""
        self.cache.keep(sentences)
