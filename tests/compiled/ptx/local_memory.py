"""Local memory: some bytes of each thread, where a compiler puts what it cannot keep in registers."""

from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8


class LocalMemory:
    """Addresses begin at 0 in every thread. Checked are bounds, alignment, and reads of what was never written."""

    def __init__(self, machine: Any, size: int) -> None:
        self.machine, self.size = machine, size
        self.bytes = np.zeros((machine.lanes, size), u8)
        self.written = np.zeros((machine.lanes, size), bool)

    def find(self, number: int, mask: Any, address: Any, size: int) -> tuple[Any, Any]:
        """Return the active threads, as a column, and the bytes of each, a row."""
        m = self.machine
        lanes = np.arange(m.lanes) if mask is None else np.flatnonzero(np.broadcast_to(mask, (m.lanes,)))
        address = np.broadcast_to(address, (m.lanes,))[lanes].astype(i64)
        m.refuse(address % size != 0, "misaligned", number, lanes, address, f"local, {size} bytes")
        m.refuse((address < 0) | (address + size > self.size), "outside local memory", number, lanes, address)
        return lanes, np.clip(address, 0, max(self.size - size, 0))[:, None] + np.arange(size)

    def load(self, number: int, mask: Any, address: Any, width: int, count: int) -> list[Any]:
        lanes, place = self.find(number, mask, address, width * count // 8)
        unwritten = ~self.written[lanes[:, None], place].all(1)
        self.machine.refuse(unwritten, "local memory read before it is written", number, lanes, place[:, 0])
        values = np.zeros((self.machine.lanes, count), UINT[width])
        values[lanes] = np.ascontiguousarray(self.bytes[lanes[:, None], place]).view(UINT[width])
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        lanes, place = self.find(number, mask, address, width * len(values) // 8)
        rows = np.stack([np.broadcast_to(v, (self.machine.lanes,)) for v in values], 1)[lanes]
        self.bytes[lanes[:, None], place] = np.ascontiguousarray(rows.astype(UINT[width])).view(u8)
        self.written[lanes[:, None], place] = True
