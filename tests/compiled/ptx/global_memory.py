"""Global memory: the bytes of the launch's tensors, in this process, and the checks of each access to them.

An access must lie within one allocation, on bytes that a tensor of the launch covers where that is asked for, at a
multiple of its width. Two blocks may not touch a byte that one of them writes, unless all do so by atomics.
"""

import ctypes
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8, u64
from tests.compiled.ptx.atomics import atomic

ONES = {width: UINT[width](int("01" * (width // 8), 16)) for width in UINT}
_NOBODY, _SEVERAL, _ATOMICS = -1, -2, -3  # in place of a block's number


class Allocation:
    """Some bytes of this process; `allowed` marks those which tensors cover, if that is to be checked."""

    def __init__(self, base: int, size: int, name: str) -> None:
        self.start, self.end, self.name = base, base + size, name
        self.base = base & ~15
        self.length = base + size - self.base
        self.bytes = np.frombuffer((ctypes.c_uint8 * self.length).from_address(self.base), u8)
        self.allowed: Any = None
        self.writer: Any = None  # by byte
        self.reader: Any = None

    def view(self, of: Any, total: int, width: int) -> Any:
        """Rows of `total` bits, cut into numbers of `width` bits."""
        whole = self.length // (total // 8) * (total // 8)
        return of[:whole].view(UINT[width]).reshape(-1, total // width)

    def users(self, size: int) -> tuple[Any, Any]:
        """Who wrote and who read each byte, in rows of `size`."""
        if self.writer is None:
            self.writer, self.reader = (np.full(self.length, _NOBODY, np.int32) for _ in range(2))
        return tuple(x[: self.length // size * size].reshape(-1, size) for x in (self.writer, self.reader))


class GlobalMemory:
    """All allocations that a launch may touch."""

    def __init__(self, allocations: list[Allocation]) -> None:
        self.machine: Any = None  # whose blocks run
        self.allocations = sorted(allocations, key=lambda a: a.start)
        self.starts = np.array([a.start for a in self.allocations], u64)
        self.ends = np.array([a.end for a in self.allocations], u64)
        self.views: dict[Any, Any] = {}

    def find(self, number: int, mask: Any, address: Any, total: int) -> list[tuple[Any, Allocation, Any]]:
        """Return (threads, allocation, index) of each allocation that is touched; threads None means all."""
        m = self.machine
        size = total // 8
        address = np.broadcast_to(address, (m.lanes,))
        lanes = None if mask is None else np.flatnonzero(np.broadcast_to(mask, (m.lanes,)))
        active = address if lanes is None else address[lanes]
        if len(active) == 0:
            return []
        m.count("global", number, lanes, active, size)
        if size > 1:
            m.refuse((active & u64(size - 1)) != 0, "misaligned", number, lanes, active, f"{size} bytes")
        low, high = active.min(), active.max()
        place = int(np.searchsorted(self.starts, low, "right")) - 1
        if place >= 0 and high + u64(size) <= self.ends[place]:
            a = self.allocations[place]
            return [(lanes, a, ((active - u64(a.base)) // u64(size)).astype(i64))]
        every = np.arange(m.lanes) if lanes is None else lanes
        return [(every[which], a, index) for which, a, index in self.locate(number, every, active, total)]

    def locate(
        self, number: int, lanes: Any, address: Any, total: int, what: str = ""
    ) -> list[tuple[Any, Allocation, Any]]:
        """Return (which of them, allocation, index) of each allocation that some addresses are in."""
        size = total // 8
        places = np.searchsorted(self.starts, address, "right").astype(i64) - 1
        outside = (places < 0) | (address + u64(size) > self.ends[places])
        detail = f"{size} bytes{what and ' of a ' + what}"
        self.machine.refuse(outside, "outside all allocations", number, lanes, address, detail)
        found = []
        for p in np.unique(places[~outside]):
            these = np.flatnonzero((places == p) & ~outside)
            a = self.allocations[p]
            found.append((these, a, ((address[these] - u64(a.base)) // u64(size)).astype(i64)))
        return found

    def view(self, a: Allocation, name: str, total: int, width: int) -> Any:
        key = (id(a), name, total, width)
        if key not in self.views:
            self.views[key] = a.view(getattr(a, name), total, width)
        return self.views[key]

    def check(self, number: int, lanes: Any, a: Allocation, index: Any, total: int, kind: str) -> None:
        """Check an access that is inside the allocation. kind: read, write or atomic."""
        m = self.machine
        place = index * (total // 8) + a.base
        if a.allowed is not None:
            width = min(total, 64)
            good = (self.view(a, "allowed", total, width)[index] == ONES[width]).all(1)
            m.refuse(~good, "outside all tensors", number, lanes, place, f"{total // 8} bytes, {kind} of {a.name}")
        if m.options.races_global:
            bad = self.race(lanes, a, index, total // 8, kind)
            m.refuse(bad, "race of blocks", number, lanes, place, a.name)

    def race(self, lanes: Any, a: Allocation, index: Any, size: int, kind: str) -> Any:
        """Note who touches the bytes, and return which accesses meet another block's."""
        m = self.machine
        block = (m.block_of if lanes is None else m.block_of[lanes])[:, None]
        writer, reader = a.users(size)
        wrote = writer[index]
        if kind == "atomic":
            bad = (wrote >= 0) & (wrote != block)
            writer[index] = np.where(wrote >= 0, wrote, _ATOMICS)
            return bad.any(1)
        bad = (wrote != _NOBODY) & (wrote != block)
        read = reader[index]
        if kind == "read":
            reader[index] = np.where((read == _NOBODY) | (read == block), block, _SEVERAL)
            return bad.any(1)
        bad |= (read != _NOBODY) & (read != block)
        writer[index] = block
        return (bad | (writer[index] != block)).any(1)  # the latter: two blocks in this very instruction

    def load(self, number: int, mask: Any, address: Any, width: int, count: int) -> list[Any]:
        total = width * count
        found = self.find(number, mask, address, total)
        if len(found) == 1 and found[0][0] is None:
            _, a, index = found[0]
            self.check(number, None, a, index, total, "read")
            values = self.view(a, "bytes", total, width)[index]
        else:
            values = np.zeros((self.machine.lanes, count), UINT[width])
            for lanes, a, index in found:
                self.check(number, lanes, a, index, total, "read")
                values[slice(None) if lanes is None else lanes] = self.view(a, "bytes", total, width)[index]
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        total = width * len(values)
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "write")
            view = self.view(a, "bytes", total, width)
            for i, v in enumerate(values):
                v = np.broadcast_to(v, (self.machine.lanes,))
                view[index, i] = v if lanes is None else v[lanes]

    def atomic(self, number: int, mask: Any, address: Any, kind: str, operation: str, *operands: Any) -> list[Any]:
        """Each operand is a list of numbers. Of `cas` there are two: what to compare with, and what to put there."""
        values, every = operands[-1], self.machine.lanes
        width = values[0].itemsize * 8
        total = width * len(values)
        results = np.zeros((len(values), every), UINT[width])
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "atomic")
            view = self.view(a, "bytes", total, width)
            chosen = slice(None) if lanes is None else lanes
            for i in range(len(values)):
                given = [np.broadcast_to(x[i], (every,))[chosen] for x in operands]
                results[i, chosen] = atomic(kind, operation, view[:, i], index, *given)
        return list(results)
