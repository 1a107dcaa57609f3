"""Packed tokens from and to torch's nested tensors."""

from typing import Any

import torch
from torch import Tensor

from fastformer.host.devices import check_tensors
from fastformer.packing.layout import Layout, check_tokens
from fastformer.packing.row_map import RowMap


def from_nested(nested: Tensor) -> tuple[Tensor, Layout]:
    """Read a nested tensor `[B, (ragged), ...]`: its tokens `[T, ...]` and their layout. Differentiable.

    Waits for the device where the offsets of a jagged tensor are on one.

    Raises:
        TypeError: the tensor is not nested.
        ValueError: another dimension than the second is ragged.
    """
    check_tensors(("nested",), nested)
    if not nested.is_nested:
        raise TypeError(f"nested must be a nested tensor, not one of shape {list(nested.shape)}")
    if nested.layout != torch.jagged:
        parts = nested.unbind()
        if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise ValueError("nested must be ragged in its second dimension alone")
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=nested.dtype, device=nested.device)
        return tokens, Layout.from_lengths([len(part) for part in parts], nested.device)
    jagged: Any = nested
    if jagged._ragged_idx != 1:
        raise ValueError(f"nested must be ragged in its second dimension, not in dimension {jagged._ragged_idx}")
    values, offsets, lengths = jagged.values(), jagged.offsets(), jagged.lengths()
    given = offsets.diff() if lengths is None else lengths
    layout = Layout.from_lengths(given.cpu(), values.device)
    if lengths is None and layout.total == values.shape[0]:
        return values, layout
    # With holes between the sequences, or rows before and after them.
    starts = offsets[:-1].repeat_interleave(given, output_size=layout.total)
    return RowMap.of(starts + layout.positions, values.shape[0]).gather(values), layout


def to_nested(tokens: Tensor, layout: Layout) -> Tensor:
    """Make a nested tensor `[B, (ragged), ...]` of layout torch.jagged around packed tokens. Differentiable.

    Raises:
        ValueError: the number of tokens is not the layout's.
    """
    check_tokens(tokens, layout)
    return torch.nested.nested_tensor_from_jagged(
        tokens, layout.offsets, min_seqlen=layout.shortest, max_seqlen=layout.max_length
    )
