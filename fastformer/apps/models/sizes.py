"""Compute the size of a model from its settings, before a tensor is allocated.

Settings may hold a typing error or be untrusted. For sizes near 2^63 torch overflows, and for those a little below it
fills the memory.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MOST_LAYERS = 10_000  # of one stack; a layer of any width takes a millisecond and tens of kilobytes to construct


_SHAPE = (  # settings that describe a model, in order
    *("encoder_layers", "decoder_layers", "layers", "d_model", "heads", "feed_forward"),
    *("source_vocabulary", "target_vocabulary", "vocabulary", "classes", "embeddings"),
)


def describe_model(network: Callable[[Any], nn.Module], config: Any) -> str:
    """Describe a model by its distinct parameters, their bytes, and the settings of its shape."""
    with torch.device("meta"):
        parameters = list(network(config).parameters())
    count = sum(p.numel() for p in parameters)
    size = sum(p.numel() * p.element_size() for p in parameters)
    shape = ", ".join(f"{name} {getattr(config, name)}" for name in _SHAPE if hasattr(config, name))
    return f"{count:,} parameters, {size / 2**20:.1f} MiB: {shape}"


def check_memory(settings: Any) -> None:
    """Raise ValueError if the matrices of a model with these settings exceed this machine's memory in fp32."""
    needed, available = 4 * settings.matrix_numbers, _memory()
    if available is not None and needed > available:
        raise ValueError(
            f"a model of these sizes has at least {settings.matrix_numbers:,} parameters, {needed / 2**30:,.1f} GiB in "
            f"fp32, but this machine has {available / 2**30:,.1f} GiB: lower d_model, feed_forward, the layers or the "
            "vocabulary"
        )


def _memory() -> int | None:
    """Return the bytes that this process may use, without swap; None if the system does not report them."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical if limit == resource.RLIM_INFINITY else min(physical, limit)
