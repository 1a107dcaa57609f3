"""Global memory: the bytes of the launch's tensors, in this process.

An access must lie within one allocation, on bytes that a tensor of the launch covers where that is asked for, at a
multiple of its width. Two blocks may not touch a byte that one of them writes, unless all do so by atomics.
"""

import ctypes
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8, u64

ONES = {width: UINT[width](int("01" * (width // 8), 16)) for width in UINT}
_NOBODY, _SEVERAL, _ATOMICS = -1, -2, -3  # in place of a block's number


def add_in_order(view: Any, index: Any, values: Any) -> Any:
    """Add numbers of fp32 to an array of bits, in the order of the threads; return the bits that were there before."""

    def add(old: Any, new: Any) -> Any:
        return (old.view(np.float32) + new.view(np.float32)).view(old.dtype)

    if len(np.unique(index)) == len(index):
        old = view[index]
        view[index] = add(old, values)
        return old
    old = np.empty(len(index), view.dtype)
    for n, at in enumerate(index):
        old[n] = view[at]
        view[at : at + 1] = add(view[at : at + 1], values[n : n + 1])
    return old


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
        self.views: dict[Any, Any] = {}

    def view(self, name: str, total: int, width: int) -> Any:
        """Rows of `total` bits of what every byte has under that name, cut into numbers of `width` bits."""
        if (name, total, width) not in self.views:
            whole = self.length // (total // 8) * (total // 8)
            view = getattr(self, name)[:whole].view(UINT[width]).reshape(-1, total // width)
            self.views[name, total, width] = view
        return self.views[name, total, width]

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

    def find(self, number: int, mask: Any, address: Any, total: int) -> list[tuple[Any, Allocation, Any]]:
        """Return (threads, allocation, index) of each allocation that is touched."""
        m, size = self.machine, total // 8
        lanes, address = m.active(mask, address)
        if len(lanes) == 0:
            return []
        m.refuse((address & u64(size - 1)) != 0, "misaligned", number, lanes, address, f"{size} bytes")
        return [(lanes[which], a, index) for which, a, index in self.locate(number, lanes, address, size)]

    def locate(self, number: int, lanes: Any, address: Any, size: int) -> list[tuple[Any, Allocation, Any]]:
        """Return (which of them, allocation, index) of each allocation that some addresses are in."""
        place = int(np.searchsorted(self.starts, address.min(), "right")) - 1
        if place >= 0 and address.max() + u64(size) <= self.ends[place]:  # nearly always
            a = self.allocations[place]
            return [(slice(None), a, ((address - u64(a.base)) // u64(size)).astype(i64))]
        places = np.searchsorted(self.starts, address, "right").astype(i64) - 1
        outside = (places < 0) | (address + u64(size) > self.ends[places])
        self.machine.refuse(outside, "outside all allocations", number, lanes, address, f"{size} bytes")
        actual = []
        for p in np.unique(places[~outside]):
            these = np.flatnonzero((places == p) & ~outside)
            a = self.allocations[p]
            actual.append((these, a, ((address[these] - u64(a.base)) // u64(size)).astype(i64)))
        return actual

    def check(self, number: int, lanes: Any, a: Allocation, index: Any, total: int, kind: str) -> None:
        """Check an access that is inside the allocation. kind: read, write or atomic."""
        m = self.machine
        place = index * (total // 8) + a.base
        if a.allowed is not None:
            width = min(total, 64)
            good = (a.view("allowed", total, width)[index] == ONES[width]).all(1)
            m.refuse(~good, "outside all tensors", number, lanes, place, f"{total // 8} bytes, {kind} of {a.name}")
        if m.options.races_global:
            bad = self.race(lanes, a, index, total // 8, kind)
            m.refuse(bad, "race of blocks", number, lanes, place, a.name)

    def race(self, lanes: Any, a: Allocation, index: Any, size: int, kind: str) -> Any:
        """Note who touches the bytes, and return which accesses meet another block's."""
        block = self.machine.block_of[lanes][:, None]
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
        values = np.zeros((self.machine.lanes, count), UINT[width])
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "read")
            values[lanes] = a.view("bytes", total, width)[index]
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        total, m = width * len(values), self.machine
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "write")
            view = a.view("bytes", total, width)
            for i, v in enumerate(values):
                view[index, i] = m.of_threads(v)[lanes]

    def add(self, number: int, mask: Any, address: Any, values: list[Any]) -> list[Any]:
        """Add numbers of fp32 by an atomic operation; return what was there."""
        m, total = self.machine, 32 * len(values)
        results = np.zeros((len(values), m.lanes), UINT[32])
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "atomic")
            view = a.view("bytes", total, 32)
            for i, value in enumerate(values):
                results[i, lanes] = add_in_order(view[:, i], index, m.of_threads(value)[lanes])
        return list(results)
