"""Sequences of different lengths, one after another, without padding: `Layout`, and conversions to and from batches."""

from fastformer.packing.layout import Layout, from_nested, lengths_of, offsets_of, pack, to_nested, unpack

__all__ = ["Layout", "from_nested", "lengths_of", "offsets_of", "pack", "to_nested", "unpack"]
