"""Shared memory of all blocks that run together, the checks of each access to it, and cp.async.

Each byte has a state: unwritten, written, or awaiting an asynchronous copy. With `races_shared` it has more: which warp
wrote and read it since which barrier, how many wgmma under way read it, and whether it was written since the last
fence.proxy.async.
Nothing is found by luck: warps run in step, and a race is found by who did what between barriers.
"""

from typing import Any, NamedTuple

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8
from tests.compiled.ptx.global_memory import ONES

BASE = 1024  # where a block's shared memory begins: the system takes the first KiB on sm_90
WRITTEN, AWAITED = 1, 2  # states of a byte; 0: unwritten
_SEVERAL = 64  # added to a warp's number: several warps
_EPOCH = 128  # epochs of barriers count in units of this, above the warp


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

    def find(self, number: int, lanes: Any, address: Any, total: int) -> Any:
        """Return where some threads' addresses are: the index into a view of elements of that many bits."""
        m, size = self.machine, total // 8
        address = address.astype(i64)
        m.refuse((address & (size - 1)) != 0, "misaligned", number, lanes, address, f"shared, {size} bytes")
        bad = (address < BASE) | (address + size > BASE + self.size)
        m.refuse(bad, "outside shared memory", number, lanes, address, f"{size} bytes")
        return (np.clip(address, BASE, BASE + self.size - size) + self.block_base[lanes]) // size

    def active(self, number: int, mask: Any, address: Any, total: int) -> tuple[Any, Any]:
        """Return the active threads, and the index of each."""
        lanes, address = self.machine.active(mask, address)
        return lanes, self.find(number, lanes, address, total)

    def check_read(self, number: int, lanes: Any, index: Any, total: int) -> None:
        width = min(total, 64)
        state = self.view("state", total, width)[index]
        bad = (state != ONES[width]).any(1)
        if bad.any():
            copied = (state[bad].view(u8) == AWAITED).any()
            what = "while a copy to it is under way" if copied else "before it is written"
            self.refuse(bad, f"shared memory read {what}", number, lanes, index, total // 8, f"{total // 8} bytes")

    def refuse(self, bad: Any, kind: str, number: int, lanes: Any, index: Any, size: int, detail: str = "") -> None:
        self.machine.refuse(bad, kind, number, lanes, self.address(index, size), detail)

    def race(self, number: int, lanes: Any, index: Any, size: int, changed: Any = None) -> None:
        """Look for another warp's access since the last barrier, of which one writes.

        Args:
            changed: which accesses change what is there, or None for reads. Writing what is there already harms
                nobody: Triton lets several warps store one value to one place.
        """
        m = self.machine
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
            there = m.here(mask).reshape(m.blocks, -1).any(1)
            self.generic.reshape(m.blocks, self.stride)[there] = 0

    def check_overwrite(self, number: int, lanes: Any, index: Any, total: int) -> None:
        """Nobody may write what a wgmma under way reads."""
        if self.machine.wgmma.pending:
            bad = self.view("reading", total, 8)[index].any(1)
            what = "shared memory written that a wgmma under way reads"
            self.refuse(bad, what, number, lanes, index, total // 8)

    def mark(self, index: Any, total: int, state: int) -> None:
        width = min(total, 64)
        self.view("state", total, width)[index] = ONES[width] * UINT[width](state)

    def busy(self, number: int, lanes: Any, index: Any, total: int, what: str) -> None:
        """Refuse to touch bytes that a copy is under way to."""
        awaited = (self.view("state", total, 8)[index] == AWAITED).any(1)
        self.refuse(awaited, what + " while a copy to it is under way", number, lanes, index, total // 8)

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
        lanes, index = self.active(number, mask, address, total)
        self.check_read(number, lanes, index, total)
        if self.races:
            self.race(number, lanes, index, total // 8)
        values = np.zeros((m.lanes, count), UINT[width])
        values[lanes] = self.view("bytes", total, width)[index]
        return [np.ascontiguousarray(values[:, i]) for i in range(count)]

    def store(self, number: int, mask: Any, address: Any, width: int, values: list[Any]) -> None:
        total, m = width * len(values), self.machine
        lanes, index = self.active(number, mask, address, total)
        rows = np.empty((len(index), len(values)), UINT[width])
        for i, v in enumerate(values):
            rows[:, i] = m.of_threads(v)[lanes]
        self.put(number, lanes, index, total, rows)


class Copy(NamedTuple):
    """What threads have asked for by cp.async and not waited for."""

    number: int  # of the instruction
    size: int
    lanes: Any
    group: Any  # of each thread
    index: Any  # in shared memory, in units of `size`
    data: Any

    def part(self, which: Any) -> "Copy":
        """That of some threads."""
        return Copy(self.number, self.size, *(x[which] for x in self[2:]))


class Copies:
    """cp.async of all threads, each of which counts its own groups.

    Bytes arrive at the wait for their group, as late as the model allows; until then nobody touches them.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.pending: list[Copy] = []
        self.group = np.zeros(machine.lanes, np.int64)

    def issue(self, number: int, mask: Any, to: Any, source: Any, size: int, given: Any) -> None:
        """Copy `size` bytes a thread; where `given` is 0, zeros.

        Raises:
            NotImplementedError: `given` is another part of `size`.
        """
        m = self.machine
        lanes, index = m.shared.active(number, mask, to, size * 8)
        if len(lanes) == 0:
            return
        width = min(size * 8, 64)
        expected = mask
        if given is not None:
            n = m.of_threads(given)[lanes]
            if np.any((n != 0) & (n != size)):
                raise NotImplementedError("cp.async of a part")
            expected = np.zeros(m.lanes, bool)
            expected[lanes] = n != 0
        data = np.stack(m.memory.load(number, expected, source, width, size * 8 // width), 1)[lanes]
        if m.shared.races:  # from here on the bytes may change at any time
            m.shared.race(number, lanes, index, size, np.ones(len(lanes), bool))
            m.shared.check_overwrite(number, lanes, index, size * 8)
        m.shared.busy(number, lanes, index, size * 8, "shared memory copied to")
        m.shared.mark(index, size * 8, AWAITED)
        self.pending.append(Copy(number, size, lanes, self.group[lanes], index, data))

    def commit(self, mask: Any) -> None:
        self.group = self.group + self.machine.here(mask)

    def wait(self, mask: Any, allowed: int) -> None:
        """Let arrive what the threads have asked for and committed, but for the last `allowed` groups."""
        m = self.machine
        pending, self.pending = self.pending, []
        for copy in pending:
            done = m.here(mask)[copy.lanes] & (copy.group < self.group[copy.lanes] - allowed)
            if not done.all():
                self.pending.append(copy.part(~done))
            if done.any():
                come = copy.part(done)
                m.shared.put(come.number, come.lanes, come.index, come.size * 8, come.data, copied=True)
