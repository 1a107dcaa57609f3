"""Sequences of different lengths, one after another, without padding: `Layout`, and the ways in and out."""

from fastformer.packing.layout import Layout, from_nested, lengths_of, offsets_of, pack, to_nested, unpack

__all__ = ["Layout", "from_nested", "lengths_of", "offsets_of", "pack", "to_nested", "unpack"]
