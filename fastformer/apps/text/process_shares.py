"""Which sequences of a batch each of several processes takes."""

import torch
from torch import Tensor


def share_of(lengths: Tensor, rank: int, world: int) -> slice:
    """The sequences of process `rank` of `world`: consecutive, about as many tokens for each process.

    A sequence goes to the process in whose part of the tokens its middle lies; a process may get none.

    Args:
        lengths: int64 `[B]`, on the CPU: tokens of each sequence, or whatever makes it work.
        rank: 0 to world - 1.
        world: number of processes.
    """
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    owners = ((2 * ends - lengths) * world // max(2 * total, 1)).clamp(max=world - 1)  # [B], ascending
    start, stop = torch.searchsorted(owners, torch.tensor([rank, rank + 1], device="cpu")).tolist()
    return slice(start, stop)


def rows_of(ids: Tensor, lengths: Tensor, sequences: slice) -> Tensor:
    """Consecutive sequences of ids that are packed `[T]` or padded `[B, L]`, in the same form."""
    if ids.dim() == 2:
        return ids[sequences]
    start = int(lengths[: sequences.start].sum())
    return ids[start : start + int(lengths[sequences].sum())]
