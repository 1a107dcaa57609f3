"""Caches that a packed layer fills: it gives them its keys and values padded, and attends to them packed.

Letters: B batch, H heads, L padded length, K head size, N tokens.
"""

import copy
from typing import Any

from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from fastformer.packing import Layout, unpack


class Unpacking(DynamicCache):  # type: ignore[misc]
    """A DynamicCache that is filled for the first time, by a layer whose batch is packed.

    It shares all that the real one has; `update` hands over what was computed, and returns it as it came.
    """

    real: DynamicCache
    layout: Layout

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values `[1, H, N, K]`."""
        padded = (unpack(x[0].transpose(0, 1), self.layout).transpose(1, 2) for x in (key_states, value_states))
        self.real.update(*padded, *args, **kwargs)  # [B, H, L, K]
        return key_states, value_states


def takes(cache: Any) -> bool:
    """Whether a packed layer can fill a cache; whether it holds something already says the mask."""
    if type(cache) is EncoderDecoderCache:
        return takes(cache.self_attention_cache) and takes(cache.cross_attention_cache)
    return cache is None or type(cache) is DynamicCache


def unpacking(cache: Any, layout: Layout, key_layout: Layout) -> Any:
    """Return the cache for one packed layer.

    Args:
        cache: one that `takes` says yes to.
        layout: of the layer's own tokens.
        key_layout: of the encoder's.
    """
    if type(cache) is EncoderDecoderCache:
        both = copy.copy(cache)  # which shares what tells the layers that are filled
        both.self_attention_cache = unpacking(cache.self_attention_cache, layout, layout)
        both.cross_attention_cache = unpacking(cache.cross_attention_cache, key_layout, key_layout)
        return both
    made = Unpacking.__new__(Unpacking)
    made.__dict__.update(cache.__dict__, real=cache, layout=layout)
    return made
