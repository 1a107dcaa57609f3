"""Global memory: the bytes of the launch's tensors, in this process; local memory: some bytes of each thread.

An access must lie within one allocation, on bytes that a tensor of the launch covers where that is asked for, at a
multiple of its width. Two blocks may not touch a byte that one of them writes, unless all do so by atomics.
"""

import ctypes
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8, u64

ONES = {width: UINT[width](int("01" * (width // 8), 16)) for width in UINT}
_NOBODY, _SEVERAL, _ATOMICS = -1, -2, -3  # in place of a block's number
_REAL = {"f32": np.float32, "f64": np.float64}
_FLOAT = {"add": np.add, "min": np.fmin, "max": np.fmax}
_INTEGER = {"add": np.add, "min": np.minimum, "max": np.maximum}
_INTEGER |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
OPERATIONS = {*_INTEGER, "exch", "cas", "inc", "dec"}


def atomic(kind: str, operation: str, view: Any, index: Any, *operands: Any) -> Any:
    """Read, change and write an array of bits in the order of the threads; return what was read.

    Args:
        operands: the values; of `cas` two, what to compare with, and what to put there.

    Raises:
        NotImplementedError: floats of 16 bits, `inc` and `dec`, which Triton does not emit for our kernels.
    """
    if kind in ("f16x2", "bf16x2", "f16", "bf16") or operation in ("inc", "dec"):
        raise NotImplementedError(f"atomic {operation} {kind}")

    def combine(old: Any, new: Any) -> Any:
        if operation == "exch":
            return new
        if kind in _REAL:
            return _FLOAT[operation](old.view(_REAL[kind]), new.view(_REAL[kind])).view(old.dtype)
        a, b = (x.view(f"i{x.itemsize}") if kind[0] == "s" else x for x in (old, new))
        return _INTEGER[operation](a, b).view(old.dtype)

    values = operands[-1]
    if operation != "cas" and len(np.unique(index)) == len(index):
        old = view[index]
        view[index] = combine(old, values)
        return old
    old = np.empty(len(index), view.dtype)
    for n, at in enumerate(index):
        old[n] = view[at]
        if operation == "cas":
            view[at] = values[n] if view[at] == operands[0][n] else view[at]
        else:
            view[at : at + 1] = combine(view[at : at + 1], values[n : n + 1])
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
        m.count("global", number, lanes, address, size)
        m.refuse((address & u64(size - 1)) != 0, "misaligned", number, lanes, address, f"{size} bytes")
        return [(lanes[which], a, index) for which, a, index in self.locate(number, lanes, address, size)]

    def locate(
        self, number: int, lanes: Any, address: Any, size: int, what: str = ""
    ) -> list[tuple[Any, Allocation, Any]]:
        """Return (which of them, allocation, index) of each allocation that some addresses are in."""
        place = int(np.searchsorted(self.starts, address.min(), "right")) - 1
        if place >= 0 and address.max() + u64(size) <= self.ends[place]:  # nearly always
            a = self.allocations[place]
            return [(slice(None), a, ((address - u64(a.base)) // u64(size)).astype(i64))]
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

    def atomic(self, number: int, mask: Any, address: Any, kind: str, operation: str, *operands: Any) -> list[Any]:
        """Each operand is a list of numbers. Of `cas` there are two: what to compare with, and what to put there."""
        values, m = operands[-1], self.machine
        width = values[0].itemsize * 8
        total = width * len(values)
        results = np.zeros((len(values), m.lanes), UINT[width])
        for lanes, a, index in self.find(number, mask, address, total):
            self.check(number, lanes, a, index, total, "atomic")
            view = a.view("bytes", total, width)
            for i in range(len(values)):
                given = [m.of_threads(x[i])[lanes] for x in operands]
                results[i, lanes] = atomic(kind, operation, view[:, i], index, *given)
        return list(results)


class LocalMemory:
    """Where a compiler puts what it cannot keep in registers; addresses begin at 0 in every thread.

    Checked are bounds, alignment, and reads of what was never written.
    """

    def __init__(self, machine: Any, size: int) -> None:
        self.machine, self.size = machine, size
        self.bytes = np.zeros((machine.lanes, size), u8)
        self.written = np.zeros((machine.lanes, size), bool)

    def find(self, number: int, mask: Any, address: Any, size: int) -> tuple[Any, Any]:
        """Return the active threads, as a column, and the bytes of each, a row."""
        m = self.machine
        lanes, address = m.active(mask, address)
        address = address.astype(i64)
        m.refuse(address % size != 0, "misaligned", number, lanes, address, f"local, {size} bytes")
        m.refuse((address < 0) | (address + size > self.size), "outside local memory", number, lanes, address)
        return lanes[:, None], np.clip(address, 0, max(self.size - size, 0))[:, None] + np.arange(size)

    def load(self, number: int, mask: Any, address: Any, width: int, count: int) -> list[Any]:
        lanes, place = self.find(number, mask, address, width * count // 8)
        unwritten = ~self.written[lanes, place].all(1)
        self.machine.refuse(unwritten, "local memory read before it is written", number, lanes[:, 0], place[:, 0])
        values = np.zeros((self.machine.lanes, count), UINT[width])
        values[lanes[:, 0]] = np.ascontiguousarray(self.bytes[lanes, place]).view(UINT[width])
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        lanes, place = self.find(number, mask, address, width * len(values) // 8)
        rows = np.stack([self.machine.of_threads(v) for v in values], 1)[lanes[:, 0]]
        self.bytes[lanes, place] = np.ascontiguousarray(rows.astype(UINT[width])).view(u8)
        self.written[lanes, place] = True
