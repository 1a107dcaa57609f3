"""Shared by the loops of decoding: their step, whether CUDA graphs replay it, and when finished rows leave."""

from typing import Any

from torch import Tensor

from fastformer.host.cuda_graphs import Recorder, memory_for_graphs, recorder
from fastformer.host.devices import device_of, send
from fastformer.nn.cache import KVCache, StaticKVCache
from fastformer.nn.inspection import has_hooks

# With CUDA graphs, removing rows costs an eager step and a capture. Finished rows leave once they have cost as much, in
# rows times steps: on one H200 two eager steps of 6+6 layers took 10 ms (`pytest benchmarks -k "decoding and graphs"`);
# a row is predicted to cost 2 us a step (26 million multiply-adds in fp32, and its keys and values).
IDLE_ROWS = 5000
# CUDA graphs need a cache for the longest text from the start, and beam search copies all of it: by default it may take
# this share of the device's memory.
_CACHE_SHARE = 1 / 10


def next_logits(model: Any, embedding: Any, cache: KVCache, ids: Tensor) -> Tensor:
    """Feed the next token of each row, int64 `[R]`; return the logits of the one after, `[R, V]`.

    With a cache of fixed capacity nothing is read on the host, so that a CUDA graph can repeat it.
    """
    positions, end = cache.lengths, cache.capacity
    if not isinstance(cache, StaticKVCache):
        end = int(positions.max()) + 1
        (positions,) = send(ids.device, positions)
    x = embedding(ids[:, None], positions[:, None], end)  # [R, 1, D]
    return model.logits(model.decoder.step(x, cache)[:, 0])  # type: ignore[no-any-return]


def recorder_of(model: Any, layers: int, tokens: int, cuda_graphs: bool | None) -> Recorder | None:
    """Return the recorder of a loop that may cache this many tokens in so many layers, or None for eager steps.

    Args:
        cuda_graphs: None: whether the device has graphs and enough memory, and the model no hooks, which replays would
            not call.

    Raises:
        ValueError: cuda_graphs is True without a CUDA device.
    """
    device = device_of(model)
    if cuda_graphs is None:
        c = model.config
        numbers = 2 * tokens * layers * (c.kv_heads or c.heads) * c.head_width
        cache_bytes = numbers * model.output.weight.element_size()
        cuda_graphs = 0 < cache_bytes <= _CACHE_SHARE * memory_for_graphs(device) and not has_hooks(model.modules())
    if not cuda_graphs:
        return None
    graph_recorder = recorder(device, keeps_memory=True)
    if graph_recorder is None:
        raise ValueError(f"cuda_graphs has an effect only with a CUDA device, not with a {device.type}")
    return graph_recorder
