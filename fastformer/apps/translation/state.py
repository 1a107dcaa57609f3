"""The state of decoding with a translation model: unfinished hypotheses in the decoder's cache.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, V vocabulary.
"""

from torch import Tensor

from fastformer.apps.models.decoding import next_logits
from fastformer.apps.translation.model import TranslationModel


class DecoderState:
    """A batch of unfinished hypotheses; `cache` has their keys and values, and reorders them.

    Args:
        model: in evaluation mode.
        source: int64 ids with eos, packed `[S]` or padded `[B, S]`.
        source_lengths: int64 `[B]`.
        hypotheses: N, rows a sentence.
        capacity: of the cache, in tokens, at most what learned positions hold. It then counts the positions on the
            device, so that a CUDA graph can repeat a step. None: it grows.

    Raises:
        RuntimeError: a layer of the decoder, or attention in it, has hooks or a class that fastformer does not know.
    """

    def __init__(
        self,
        model: TranslationModel,
        source: Tensor,
        source_lengths: Tensor,
        hypotheses: int = 1,
        capacity: int | None = None,
    ) -> None:
        memory, layout = model.encode(source, source_lengths)
        self.model = model
        self.cache = model.decoder.new_cache(memory, memory_layout=layout, hypotheses=hypotheses, capacity=capacity)

    def step(self, ids: Tensor) -> Tensor:
        """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`."""
        return next_logits(self.model, self.model.target_embedding, self.cache, ids)

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, int64, ascending."""
        self.cache.keep(sentences)
