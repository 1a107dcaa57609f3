"""Sequences of different lengths, one after another, without padding: `Layout`, and conversions to and from batches."""

from fastformer.packing.layout import Layout, lengths_of, offsets_of, pack, unpack
from fastformer.packing.nested import from_nested, to_nested

__all__ = ["Layout", "from_nested", "lengths_of", "offsets_of", "pack", "to_nested", "unpack"]
