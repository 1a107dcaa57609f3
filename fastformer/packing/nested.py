"""Packed tokens from and to torch's nested tensors."""

import torch
from torch import Tensor

from fastformer.host.devices import check_types
from fastformer.packing.layout import Layout, check_tokens


def from_nested(nested: Tensor) -> tuple[Tensor, Layout]:
    """Read a nested tensor `[B, (ragged), ...]`: its tokens `[T, ...]` and their layout. Differentiable.

    Raises:
        TypeError: the tensor is not nested.
        ValueError: another dimension than the second is ragged.
    """
    check_types(("nested",), nested)
    if not nested.is_nested:
        raise TypeError(f"nested must be a nested tensor, not one of shape {list(nested.shape)}")
    parts = nested.unbind()
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise ValueError("nested must be ragged in its second dimension alone")
    tokens = torch.cat(parts) if parts else torch.empty(0, dtype=nested.dtype, device=nested.device)
    return tokens, Layout.from_lengths([len(part) for part in parts], nested.device)


def to_nested(tokens: Tensor, layout: Layout) -> Tensor:
    """Make a nested tensor `[B, (ragged), ...]` of layout torch.jagged around packed tokens. Differentiable.

    Raises:
        ValueError: the number of tokens is not the layout's.
    """
    check_tokens(tokens, layout)
    return torch.nested.nested_tensor_from_jagged(
        tokens, layout.offsets, min_seqlen=layout.shortest, max_seqlen=layout.max_length
    )
