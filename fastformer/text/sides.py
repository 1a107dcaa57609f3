"""Which fields of a batch belong together; what lays batches out in another way needs no more of them."""

from typing import NamedTuple


class Side(NamedTuple):
    """The fields of a batch that one tensor of lengths lays out: their names."""

    lengths: str  # int64 [B]
    inputs: tuple[str, ...]  # ids that a model reads
    targets: tuple[str, ...] = ()  # ids that it predicts
