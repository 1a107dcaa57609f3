"""What layers keep for others while they run packed: caches, and the keys and values that several layers share.

Letters: B batch, H heads, L padded length, K head size, N tokens.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from fastformer.integrations.transformers.arguments import HEADS, once, to_batch
from fastformer.integrations.transformers.masks import MaskRules
from fastformer.integrations.transformers.own_code import is_as_written
from fastformer.packing import Layout


class Unpacking(DynamicCache):  # type: ignore[misc]
    """A DynamicCache that is filled for the first time, by a layer whose batch is packed.

    It shares all that the real one has; `update` hands over what was computed, and returns it as it came.
    """

    real: DynamicCache
    layout: Layout

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values `[1, H, N, K]`."""
        padded = (to_batch(x, self.layout, HEADS) for x in (key_states, value_states))
        self.real.update(*padded, *args, **kwargs)  # [B, H, L, K]
        return key_states, value_states


def takes(cache: Any) -> bool:
    """Whether a packed layer can fill a cache: one that keeps what it is given, and returns it as it came.

    Whether it holds something already says the mask, but of a memory's keys and values.
    """
    if type(cache) is EncoderDecoderCache:
        return takes(cache.self_attention_cache) and takes(cache.cross_attention_cache)
    if cache is None:
        return True
    if type(cache) is not DynamicCache or "update" in cache.__dict__:
        return False
    kinds = {type(layer) for layer in cache.layers} | {cache.layer_class_to_replicate or DynamicLayer}
    known = all(kind.__module__ == DynamicLayer.__module__ for kind in kinds)
    return (
        known and not any("update" in vars(layer) for layer in cache.layers) and is_as_written({DynamicCache, *kinds})
    )


def holds_memory(cache: Any, layer: nn.Module) -> bool:
    """Whether a cache has the keys and values that a layer would make of the memory: it takes them, padded."""
    if not isinstance(cache, EncoderDecoderCache):
        return False
    return any(cache.is_updated.get(part.__dict__.get("layer_idx")) for part in layer.modules())


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


class Shared:
    """The keys and values that some layers of Gemma store and others attend to, in the form that one layer runs in.

    `real` holds them as they were stored, by a layer that ran packed or by one that did not.
    """

    def __init__(self, real: Any, rules: MaskRules, layout: Layout, packed: bool):
        self.real, self.rules, self.layout, self.packed = real, rules, layout, packed

    def __setitem__(self, name: str, states: tuple[Tensor, Tensor]) -> None:
        self.real[name] = states

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        """`[1, H, N, K]`, or `[B, H, L, K]`."""
        return tuple(self._in_form(x) for x in self.real[name])

    def _in_form(self, x: Tensor) -> Tensor:
        if ((x.shape[0], x.shape[2]) == (1, self.layout.total)) == self.packed:
            return x
        return once(x, self.layout, self.rules, HEADS) if self.packed else to_batch(x, self.layout, HEADS)
