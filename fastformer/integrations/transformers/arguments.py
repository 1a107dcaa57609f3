"""What a layer is given: by which names, and the tokens of a padded batch as one sequence, and back.

Letters: B batch, L padded length, D model width, H heads, K head size, N tokens.
"""

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fastformer.integrations.transformers.masks import MaskRules
from fastformer.packing import Layout, pack, unpack

Axes = tuple[int, int]  # of the rows and the positions

STATES: Axes = (-3, -2)  # of hidden states [B, L, D]; Gemma 3n has several such, [4, B, L, D]
HEADS: Axes = (0, 2)  # of keys and values [B, H, L, K]
# Tensors with a value for each token, or for each position (a row alone), or tuples of such: their axes, and how many
# dimensions they may have.
BY_TOKEN: dict[str, tuple[Axes, tuple[int, ...]]] = {
    "position_ids": ((-2, -1), (2, 3)),
    "position_embeddings": ((-3, -2), (3,)),
    "per_layer_input": ((-3, -2), (3,)),
    "attention_scaling": ((-4, -2), (4,)),
    "audio_token_mask": ((-2, -1), (2,)),
}


def parameters(layer: nn.Module) -> tuple[str, ...]:
    """The names of what a layer's forward takes by position."""
    cls: Any = type(layer)
    return _parameters(cls)


@lru_cache(maxsize=1000)
def _parameters(cls: Any) -> tuple[str, ...]:
    its = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in its if p.kind is p.POSITIONAL_OR_KEYWORD)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument, but for numbers."""
    if isinstance(value, Tensor) and value.dim() > 0:
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors(x)


def by_token(name: str, value: Any, batch: int, length: int) -> bool:
    """Whether all tensors of an argument have a row for each of the batch, or one for all, of its positions."""
    (rows, positions), dims = BY_TOKEN[name]
    found = tensors(value)
    return all(x.dim() in dims and x.shape[rows] in (1, batch) and x.shape[positions] == length for x in found)


def to_tokens(x: Tensor, layout: Layout, axes: Axes = STATES) -> Tensor:
    """`[…, B, L, …]`, or a row for all, `[…, 1, L, …]`, to `[…, 1, N, …]`."""
    rows_first = x.movedim(axes, (0, 1))
    if rows_first.shape[0] == layout.batch:
        found = pack(rows_first, layout)
    else:
        found = rows_first[0].index_select(0, layout.origin % layout.columns)
    return found[None].movedim((0, 1), axes).contiguous()


def to_batch(x: Tensor, layout: Layout, axes: Axes = STATES) -> Tensor:
    """`[…, 1, N, …]` to `[…, B, L, …]`, zeros in place of padding."""
    return unpack(x.movedim(axes, (0, 1))[0], layout).movedim((0, 1), axes)


def argument(name: str, value: Any, layout: Layout, rules: MaskRules) -> Any:
    """An argument that is `by_token`, packed; once for all layers."""
    if isinstance(value, tuple | list):
        return type(value)(argument(name, x, layout, rules) for x in value)
    return value if value is None else once(value, layout, rules, BY_TOKEN[name][0])


def once(x: Tensor, layout: Layout, rules: MaskRules, axes: Axes = STATES) -> Tensor:
    """`to_tokens`, which the layers of a model share."""
    key = (id(x), axes, torch.is_grad_enabled())
    return rules.once(key, lambda: (x, to_tokens(x, layout, axes)))[1]  # x is kept, so that no other has its id
