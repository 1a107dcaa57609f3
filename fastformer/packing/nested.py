"""Packed tokens from and to torch's nested tensors."""

import torch
from torch import Tensor

from fastformer.host.devices import check_types
from fastformer.packing.layout import Layout, check_tokens


def from_nested(nested: Tensor) -> tuple[Tensor, Layout]:
    """Return the tokens `[T, ...]` and the layout of a nested tensor `[B, (ragged), ...]`. Differentiable.

    Raises:
        TypeError: the tensor is not nested.
        ValueError: a dimension other than the second is ragged.
    """
    check_types(("nested",), nested)
    if not nested.is_nested:
        raise TypeError(f"nested must be a nested tensor, not one of shape {list(nested.shape)}")
    sequences = nested.unbind()
    if any(sequence.shape[1:] != sequences[0].shape[1:] for sequence in sequences):
        raise ValueError("nested must be ragged in its second dimension alone")
    tokens = torch.cat(sequences) if sequences else torch.empty(0, dtype=nested.dtype, device=nested.device)
    return tokens, Layout.from_lengths([len(sequence) for sequence in sequences], nested.device)


def to_nested(tokens: Tensor, layout: Layout) -> Tensor:
    """Make a nested tensor `[B, (ragged), ...]` of layout torch.jagged around packed tokens. Differentiable.

    Raises:
        ValueError: the number of tokens is not the layout's.
    """
    check_tokens(tokens, layout)
    return torch.nested.nested_tensor_from_jagged(
        tokens, layout.offsets, min_seqlen=layout.shortest, max_seqlen=layout.max_length
    )
