"""Masks of scores that a model or a user made: what of them is padding.

Letters: B batch, T queries, S keys.
"""

import itertools
import threading
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.integrations.transformers.masks import MaskRules
from fastformer.modes import has_values, recorded

# What models add to scores of padding: the lowest number of a dtype, or this. Of scores within some thousands the
# softmax gives such a key exactly 0.
_HIDES = -1e4
# Of each mask that is alive: how often it was written to and in which forward pass it was read, and what was read from
# it. A model's layers share one.
_read: MutableMapping[Tensor, tuple[int, int, Tensor | None, dict[object, Any]]] = WeakTensorKeyDictionary()
_passes = itertools.count(1)


class _Pass(threading.local):
    """The number of the forward pass that began last in this thread."""

    number = 0


_pass = _Pass()


def new_pass() -> None:
    """A stack of layers begins: what its mask says is to be read again, once."""
    _pass.number = next(_passes)


def padding_rules(mask: Tensor, packed: bool = False) -> MaskRules | None:
    """Read a mask `[B, 1, 1, S]`, bool (True = may attend) or additive, as the padding of S queries and keys.

    Args:
        mask: its memory may be somebody's, who changes it between two calls without a trace in its version.
        packed: whether a layer has packed by it in this forward pass: then it says what was read there.

    Returns:
        None if it says anything else, or nobody can look. Waits for the device, once for all layers.
    """
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.requires_grad or recorded() or not has_values(mask):
        return None
    version, number = 0 if mask.is_inference() else mask._version, _pass.number
    known = _read.get(mask)
    if known is None or known[0] != version or (known[1] != number and not packed):
        known = _read[mask] = (version, number, _padding(mask[:, 0, 0]), {})
    _, _, key_mask, layouts = known
    if key_mask is None:
        return None
    B, S = key_mask.shape
    rules = MaskRules((B, 1, S, S), S, key_mask, _memory=dict(layouts))
    layouts.setdefault("keys", rules.real_keys(mask.device))  # nothing else of one forward pass is kept
    return rules


def _padding(values: Tensor) -> Tensor | None:
    if values.dtype == torch.bool:
        return values.clone()  # a view would keep its mask, and so what was read of it, alive
    real = values == 0
    return real if bool((real | (values <= _HIDES)).all()) else None
