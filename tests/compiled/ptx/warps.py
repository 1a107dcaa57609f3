"""Instructions of whole warps: shuffles and votes."""

from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import i64, u32

_LANE = np.arange(32)
_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
_REDUCTIONS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def require_whole(m: Any, number: int, mask: Any, size: int = 32) -> None:
    """All threads of the warps (or groups of four) of which some are there must be there."""
    if mask is not None:
        groups = np.broadcast_to(mask, (m.lanes,)).reshape(-1, size)
        missing = (groups.any(1, keepdims=True) & ~groups).reshape(-1)
        m.refuse(missing, "threads missing", number, None, np.zeros(1, i64), "an instruction of whole warps")


def by_warp(m: Any, x: Any) -> Any:
    return np.broadcast_to(x, (m.lanes,)).reshape(-1, 32)


def shuffle(m: Any, number: int, mask: Any, mode: str, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    require_whole(m, number, mask)
    a, b, c = by_warp(m, a), by_warp(m, b).astype(i64) & 31, by_warp(m, c).astype(i64)
    clamp, segment = c & 31, (c >> 8) & 31
    low = _LANE & segment
    high = low | (clamp & ~segment)
    if mode == "idx":
        source = low | (b & ~segment)
        valid = source <= high
    elif mode == "bfly":
        source = _LANE ^ b
        valid = source <= high
    elif mode == "up":
        source = _LANE - b
        valid = source >= high
    else:
        source = _LANE + b
        valid = source <= high
    source = np.where(valid, source, _LANE)
    return np.take_along_axis(a, source, 1).reshape(-1), valid.reshape(-1)


def ballot(m: Any, number: int, mask: Any, predicate: Any) -> tuple[Any, ...]:
    """What of a warp says yes, and which threads take part."""
    here = np.ones((m.lanes // 32, 32), bool) if mask is None else by_warp(m, mask)
    weights = u32(1) << _LANE.astype(u32)
    yes = (by_warp(m, predicate) & here) @ weights
    return tuple(np.repeat(x.astype(u32), 32) for x in (yes, here @ weights))


def redux(m: Any, number: int, mask: Any, operation: str, a: Any) -> Any:
    require_whole(m, number, mask)
    a = by_warp(m, a)
    return np.repeat(_REDUCTIONS[operation].reduce(a, 1, dtype=a.dtype), 32)


def elect(m: Any, number: int, mask: Any) -> tuple[Any, Any]:
    require_whole(m, number, mask)
    return np.zeros(m.lanes, u32), np.tile(_LANE == 0, m.lanes // 32)
