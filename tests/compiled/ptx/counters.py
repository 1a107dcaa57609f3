"""What accesses to memory take: sectors of global memory, wavefronts of shared memory."""

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import i64, u64


@dataclass
class Traffic:
    """Between warps and a memory: of one instruction, or of several."""

    requests: int = 0  # of a warp
    bytes: int = 0  # those that threads asked for; one that several threads of a request want counts once
    taken: int = 0  # sectors of global memory, wavefronts of shared memory
    needed: int = 0  # the least that each request's bytes take

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def ratio(self) -> float:
        """Of taken to needed: 1 is the best."""
        return self.taken / self.needed if self.needed else 1.0


def sectors(lanes: Any, address: Any, size: int) -> Traffic:
    """Count the sectors of 32 bytes that the warps ask global memory for; none of an aligned access crosses one."""
    warps, warp = np.unique(lanes // 32, return_inverse=True)
    keys = np.unique((warp.astype(u64) << u64(48)) | address.astype(u64))
    bytes_ = np.bincount((keys >> u64(48)).astype(i64), minlength=len(warps)) * size
    return Traffic(len(warps), int(bytes_.sum()), len(np.unique(keys >> u64(5))), int((-(-bytes_ // 32)).sum()))


def wavefronts(lanes: Any, place: Any, size: int) -> Traffic:
    """Count the wavefronts that accesses to shared memory take, and how many they would without bank conflicts.

    One serves 32 threads of up to 4 bytes, 16 of 8 or 8 of 16, and takes as many as the most distinct words that one
    of the 32 banks has to give.
    """
    words = max(size // 4, 1)
    phase = (lanes // (32 // words)).astype(i64)
    word = (place // 4)[:, None] + np.arange(words)
    keys = np.unique((phase[:, None] << 40 | word).reshape(-1))
    banks, counts = np.unique((keys >> 40) * 32 + (keys & 31), return_counts=True)
    starts = np.flatnonzero(np.diff(banks // 32, prepend=-1))
    taken = int(np.maximum.reduceat(counts, starts).sum()) if len(keys) else 0
    return Traffic(len(np.unique(lanes // 32)), len(lanes) * size, taken, len(starts))
