"""cp.async: bytes arrive at the wait for their group, as late as the model allows; until then nobody touches them."""

from typing import Any, NamedTuple

import numpy as np

from tests.compiled.ptx.shared_memory import AWAITED


class Copy(NamedTuple):
    """What threads have asked for and not waited for."""

    number: int  # of the instruction
    lanes: Any
    group: Any  # of each thread
    index: Any  # in shared memory, in units of `size`
    size: int
    data: Any


class Copies:
    """Of all threads; each counts its own groups."""

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
        lanes, index = m.shared.find(number, mask, to, size * 8)
        if lanes is None:
            lanes = np.arange(m.lanes)
        if len(lanes) == 0:
            return
        m.count("shared", number, lanes, index * size, size)
        width = min(size * 8, 64)
        wanted = mask
        if given is not None:
            n = np.broadcast_to(given, (m.lanes,))[lanes]
            if np.any((n != 0) & (n != size)):
                raise NotImplementedError("cp.async of a part")
            wanted = np.zeros(m.lanes, bool)
            wanted[lanes] = n != 0
        data = np.stack(m.memory.load(number, wanted, source, width, size * 8 // width), 1)[lanes]
        if m.options.races_shared:  # from here on the bytes may change at any time
            m.shared.race(number, lanes, index, size, np.ones(len(lanes), bool))
            m.shared.check_overwrite(number, lanes, index, size * 8)
        m.shared.busy(number, lanes, index, size * 8, "shared memory copied to")
        m.shared.mark(index, size * 8, AWAITED)
        self.pending.append(Copy(number, lanes, self.group[lanes], index, size, data))

    def commit(self, mask: Any) -> None:
        self.group = self.group + (1 if mask is None else np.broadcast_to(mask, self.group.shape))

    def wait(self, mask: Any, allowed: int) -> None:
        """Let arrive what the threads have asked for, but for the last `allowed` groups; -1: all, committed or not."""
        m = self.machine
        kept = []
        for copy in self.pending:
            lanes = copy.lanes
            done = np.ones(len(lanes), bool) if allowed < 0 else copy.group < self.group[lanes] - allowed
            if mask is not None:
                done &= np.broadcast_to(mask, (m.lanes,))[lanes]
            if not done.all():
                rest = ~done
                parts = (x[rest] for x in (lanes, copy.group, copy.index, copy.data))
                kept.append(Copy(copy.number, *(next(parts) for _ in range(3)), copy.size, next(parts)))
            if done.any():
                index, data = copy.index[done], copy.data[done]
                m.shared.put(copy.number, lanes[done], index, copy.size * 8, data, copied=True)
        self.pending = kept
