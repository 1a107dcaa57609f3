"""Shared memory of all blocks that run together, and the checks of each access to it.

Each byte has a state: unwritten, written, awaiting an asynchronous copy, or part of an mbarrier; and which warps have
not seen that a bulk copy to it ended. With `races_shared` it has more: which warp wrote and read it since which
barrier, how many wgmma and bulk stores under way read it, and whether it was written since the last fence.proxy.async.
Nothing is found by luck: warps run in step, and a race is found by who did what between barriers.
"""

from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8
from tests.compiled.ptx.atomics import atomic
from tests.compiled.ptx.global_memory import ONES

BASE = 1024  # where a block's shared memory begins: the system takes the first KiB on sm_90
UNWRITTEN, WRITTEN, AWAITED, HELD = 0, 1, 2, 4  # states of a byte: HELD by an mbarrier
_SEVERAL = 64  # added to a warp's number: several warps
_EPOCH = 128  # epochs of barriers count in units of this, above the warp


NOT_WAITED = "shared memory read by a warp that has not waited for the copy to it"


class SharedMemory:
    """The blocks' bytes one block after the other."""

    def __init__(self, machine: Any, size: int) -> None:
        self.machine, self.size = machine, size
        self.races = machine.options.races_shared
        self.stride = -(-max(size, 16) // 1024) * 1024
        self.bytes = np.full(self.stride * machine.blocks, 0xAA, u8)
        self.state = np.zeros_like(self.bytes)
        self.block_base = machine.block_of_lane.astype(i64) * self.stride - BASE
        if self.races:
            self.written = np.full(len(self.bytes), -1, np.int64)  # epoch and warp
            self.read = np.full(len(self.bytes), -1, np.int64)
            self.reading = np.zeros_like(self.bytes)  # how many asynchronous operations under way read it
            self.generic = np.zeros_like(self.bytes)  # 1: written since the last fence.proxy.async
        self.unseen: Any = None  # bits of warps; made with the first bulk copy
        self.views: dict[Any, Any] = {}

    def view(self, name: str, total: int, width: int) -> Any:
        """Rows of `total` bits of what every byte has under that name, cut into numbers of `width` bits."""
        key = (name, total, width)
        if key not in self.views:
            self.views[key] = getattr(self, name).view(UINT[width]).reshape(-1, total // width)
        return self.views[key]

    def address(self, index: Any, size: int) -> Any:
        """Return addresses as a block sees them."""
        return index * size % self.stride + BASE

    def find(self, number: int, mask: Any, address: Any, total: int, threads: Any = None) -> tuple[Any, Any]:
        """Return the active threads (None: all) and the index into a view of elements of that many bits."""
        m = self.machine
        size = total // 8
        every = m.lanes if threads is None else len(threads)
        address = np.broadcast_to(address, (every,))
        lanes = None if mask is None else np.flatnonzero(np.broadcast_to(mask, (every,)))
        base = self.block_base if threads is None else self.block_base[threads]
        if lanes is not None:
            address, base = address[lanes], base[lanes]
        if len(address) == 0:
            return lanes, address.astype(i64)
        if size > 1:
            m.refuse((address & (size - 1)) != 0, "misaligned", number, lanes, address, f"shared, {size} bytes")
        if address.min() < BASE or address.max() + size > BASE + self.size:
            bad = (address < BASE) | (address + size > BASE + self.size)
            m.refuse(bad, "outside shared memory", number, lanes, address, f"{size} bytes")
            address = np.clip(address, BASE, BASE + self.size - size)
        return lanes, (address + base) // size

    def check_read(self, number: int, lanes: Any, index: Any, total: int) -> None:
        width = min(total, 64)
        state = self.view("state", total, width)[index]
        bad = (state != ONES[width]).any(1)
        if bad.any():
            states = state[bad].view(u8)
            what = (
                "while a copy to it is under way" if (states == AWAITED).any()
                else "where an mbarrier is" if (states == HELD).any() else "before it is written"
            )  # fmt: skip
            self.refuse(bad, f"shared memory read {what}", number, lanes, index, total // 8, f"{total // 8} bytes")
        if self.unseen is not None:
            warps = self.machine.warp_in_block if lanes is None else self.machine.warp_in_block[lanes]
            bad = (self.unseen.reshape(-1, total // 8)[index] >> warps[:, None] & 1).any(1)
            self.refuse(bad, NOT_WAITED, number, lanes, index, total // 8)

    def refuse(self, bad: Any, kind: str, number: int, lanes: Any, index: Any, size: int, detail: str = "") -> None:
        self.machine.refuse(bad, kind, number, lanes, self.address(index, size), detail)

    def race(self, number: int, lanes: Any, index: Any, size: int, changed: Any = None) -> None:
        """Look for another warp's access since the last barrier, of which one writes.

        Args:
            changed: which accesses change what is there, or None for reads. Writing what is there already harms
                nobody: Triton lets several warps store one value to one place.
        """
        m = self.machine
        if lanes is None:
            lanes = np.arange(m.lanes)
        if changed is not None:
            if not changed.any():
                return
            lanes, index = lanes[changed], index[changed]
        now = (m.epochs[m.block_of_lane[lanes]] * _EPOCH + m.warp_in_block[lanes])[:, None]
        epoch = now // _EPOCH
        written, read = (x[: len(x) // size * size].reshape(-1, size) for x in (self.written, self.read))
        w, r = written[index], read[index]
        bad = ((w // _EPOCH) == epoch) & (w != now)
        other = ((r // _EPOCH) == epoch) & (r != now)
        if changed is not None:
            bad |= other
            written[index] = now
        else:
            read[index] = np.where(other, now | _SEVERAL, now)
            again = read[index]  # of several warps in this very instruction one is noted: note that there are more
            read[index] = np.where((again | _SEVERAL) != (now | _SEVERAL), now | _SEVERAL, again)
        if bad.any():
            what = "read" if changed is None else "write"
            self.refuse(bad.any(1), "race of warps", number, lanes, index, size, what)

    def proxy_fence(self, mask: Any) -> None:
        """What was written is there for wgmma, too, which reads by another way (the async proxy)."""
        m = self.machine
        if self.races:
            here = np.ones(m.lanes, bool) if mask is None else np.broadcast_to(mask, (m.lanes,))
            there = here.reshape(m.blocks, -1).any(1)
            self.generic.reshape(m.blocks, self.stride)[there] = 0
            m.barriers.fence(there)

    def check_overwrite(self, number: int, lanes: Any, index: Any, total: int) -> None:
        """Nobody may write what a wgmma under way reads."""
        if self.machine.wgmma.pending or self.machine.bulk.stores:
            bad = self.view("reading", total, 8)[index].any(1)
            reader = "wgmma" if self.machine.wgmma.pending else "bulk store"
            what = f"shared memory written that a {reader} under way reads"
            self.refuse(bad, what, number, lanes, index, total // 8)

    def check_fenced(self, number: int, lanes: Any, index: Any, size: int) -> None:
        """What ordinary stores wrote, the async proxy neither reads nor overwrites without a fence between."""
        if self.races:
            unfenced = self.view("generic", size * 8, 8)[index].any(1)
            self.refuse(unfenced, "no fence.proxy.async since shared memory was written", number, lanes, index, size)

    def mark(self, index: Any, total: int, state: int) -> None:
        width = min(total, 64)
        self.view("state", total, width)[index] = ONES[width] * UINT[width](state)

    def busy(self, number: int, lanes: Any, index: Any, total: int, what: str) -> None:
        """Nobody touches bytes that a copy is under way to, or an mbarrier."""
        state = self.view("state", total, 8)[index]
        if (state > WRITTEN).any():
            copy = what + " while a copy to it is under way"
            self.refuse((state == AWAITED).any(1), copy, number, lanes, index, total // 8)
            self.refuse((state == HELD).any(1), what + " where an mbarrier is", number, lanes, index, total // 8)

    def put(self, number: int, lanes: Any, index: Any, total: int, values: Any, copied: bool = False) -> None:
        """Write rows of values; the one place where bytes and their state change."""
        width, size = min(total, 64), total // 8
        if not copied:
            self.busy(number, lanes, index, total, "shared memory written")
        view = self.view("bytes", total, total // values.shape[1])
        if self.races:
            self.check_overwrite(number, lanes, index, total)
            fresh = (self.view("state", total, width)[index] != ONES[width]).any(1)
            self.race(number, lanes, index, size, (view[index] != values).any(1) | fresh)
        view[index] = values
        self.mark(index, total, WRITTEN)
        if self.races:
            self.view("generic", total, width)[index] = ONES[width]
            lost = (view[index] != values).any(1)
            self.refuse(lost, "race of warps", number, lanes, index, size, "different values written at once")

    def load(self, number: int, mask: Any, address: Any, width: int, count: int) -> list[Any]:
        total, m = width * count, self.machine
        lanes, index = self.find(number, mask, address, total)
        if len(index) == 0:
            return [np.zeros(m.lanes, UINT[width])] * count
        self.check_read(number, lanes, index, total)
        if self.races:
            self.race(number, lanes, index, total // 8)
        m.count("shared", number, lanes, index * (total // 8), total // 8)
        values = self.view("bytes", total, width)[index]
        if lanes is not None:
            full = np.zeros((m.lanes, count), UINT[width])
            full[lanes] = values
            values = full
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        total, m = width * len(values), self.machine
        lanes, index = self.find(number, mask, address, total)
        if len(index) == 0:
            return
        m.count("shared", number, lanes, index * (total // 8), total // 8)
        rows = np.empty((len(index), len(values)), UINT[width])
        for i, v in enumerate(values):
            v = np.broadcast_to(v, (m.lanes,))
            rows[:, i] = v if lanes is None else v[lanes]
        self.put(number, lanes, index, total, rows)

    def atomic(self, number: int, mask: Any, address: Any, kind: str, operation: str, *operands: Any) -> list[Any]:
        width, every = operands[0][0].itemsize * 8, self.machine.lanes
        lanes, index = self.find(number, mask, address, width)
        self.check_read(number, lanes, index, width)
        chosen = slice(None) if lanes is None else lanes
        result = np.zeros(every, UINT[width])
        given = [np.broadcast_to(x[0], (every,))[chosen] for x in operands]
        result[chosen] = atomic(kind, operation, self.view("bytes", width, width)[:, 0], index, *given)
        return [result]
