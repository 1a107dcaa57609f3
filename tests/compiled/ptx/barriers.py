"""mbarriers: phases that end when all have arrived that were to, and all bytes that were promised.

As late as the model allows: what a bulk copy brings comes when somebody waits for its mbarrier and nobody else can go
on, and a warp may touch it when it has seen the end of that phase itself, or has met with one that has, at a barrier or
by an arrival. A phase ends as soon as the promised bytes are there, whatever else is under way: too few promised, and
something is never there; too many, and the phase never ends. An mbarrier orders copies here, and not what warps do with
ordinary loads and stores between them: that is for `bar.sync`, or reported as a race.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import u32
from tests.compiled.ptx.shared_memory import HELD, UNWRITTEN

MOST = 2**20 - 1  # arrivals


@dataclass
class Barrier:
    """Of one block."""

    count: int  # arrivals of a phase
    pending: int  # those that are to come
    bytes: int = 0  # promised, and not there
    phase: int = 0
    arriving: int = 0  # bits of the warps that have arrived in this phase
    arrived: int = 0  # in the last one
    fenced: bool = False  # since it was initialised, or nobody asks
    coming: list[Any] = field(default_factory=list)  # copies under way
    come: list[Any] = field(default_factory=list)  # some warps have not seen the end of their phase


class Barriers:
    """Of all blocks that run together, by the element of 8 bytes of shared memory in which each is."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.at: dict[int, Barrier] = {}
        self.version = 0  # grows with every change
        self.failed: Any = None  # threads that looked, and have to look again
        self.looked = 0  # the instruction with which they did
        self.awaited: set[int] = set()  # where they did

    def places(self, number: int, mask: Any, address: Any, changed: bool = False) -> Iterator[tuple[int, int]]:
        """Yield (thread, place) of each active thread."""
        shared = self.machine.shared
        lanes, address = self.machine.active(mask, address)
        places = shared.find(number, lanes, address, 64)
        if shared.races:
            shared.race(number, lanes, places, 8, np.ones(len(lanes), bool) if changed else None)
        yield from zip(lanes.tolist(), places.tolist(), strict=True)

    def refuse(self, kind: str, number: int, lane: int, place: int, detail: str = "") -> None:
        self.machine.shared.refuse(np.ones(1, bool), kind, number, np.array([lane]), np.array([place]), 8, detail)

    def of(self, number: int, lane: int, place: int) -> Barrier | None:
        found = self.at.get(place)
        if found is None:
            self.refuse("no mbarrier", number, lane, place, "it was not initialised, or is invalid")
        return found

    # ---- the instructions

    def init(self, number: int, mask: Any, address: Any, count: Any) -> None:
        shared = self.machine.shared
        for lane, place in self.places(number, mask, address, changed=True):
            n = int(self.machine.of_threads(count)[lane])
            if place in self.at:
                self.refuse("an mbarrier is there already", number, lane, place)
            if not 1 <= n <= MOST:
                self.refuse("arrivals of an mbarrier", number, lane, place, f"{n}, allowed are 1 to {MOST}")
            self.at[place] = Barrier(n, n, fenced=not shared.races)
            shared.mark(np.array([place]), 64, HELD)

    def await_copy(self, number: int, lane: int, place: int, copy: Any) -> None:
        """A bulk copy begins, whose bytes count for this mbarrier."""
        if (barrier := self.of(number, lane, place)) is not None:
            if not barrier.fenced:
                self.refuse("no fence.proxy.async since an mbarrier was initialised", number, lane, place)
            barrier.coming.append(copy)
            self.version += 1

    def inval(self, number: int, mask: Any, address: Any) -> None:
        for lane, place in self.places(number, mask, address, changed=True):
            if (barrier := self.of(number, lane, place)) is None:
                continue
            if barrier.coming:
                self.refuse("an mbarrier made invalid while copies are under way", number, lane, place)
            del self.at[place]
            self.machine.shared.mark(np.array([place]), 64, UNWRITTEN)

    def arrive(self, number: int, mask: Any, address: Any, count: Any, promised: Any) -> None:
        """Promise bytes, and arrive; with a count of 0 promise only."""
        counts, promises = (self.machine.of_threads(x) for x in (count, promised))
        for lane, place in self.places(number, mask, address):
            if (barrier := self.of(number, lane, place)) is None:
                continue
            barrier.bytes += int(promises[lane])
            barrier.pending -= int(counts[lane])
            barrier.arriving |= bool(counts[lane]) << int(self.machine.warp_in_block[lane])
            self.version += 1
            if barrier.pending < 0:
                self.refuse("more arrivals than an mbarrier awaits", number, lane, place, str(barrier.count))
            self.end_phase(barrier)

    def look(self, number: int, mask: Any, address: Any, parity: Any) -> Any:
        """Return which threads see that the phase of that parity has ended."""
        m = self.machine
        parities = m.of_threads(parity)
        seen = np.zeros(m.lanes, bool)
        there: dict[tuple[int, int], list[int]] = {}
        for lane, place in self.places(number, mask, address):
            there.setdefault((place, int(parities[lane]) & 1), []).append(lane)
        for (place, wanted), lanes in there.items():
            barrier = self.of(number, lanes[0], place)
            if barrier is None:
                seen[lanes] = True
                continue
            if barrier.phase & 1 != wanted:
                seen[lanes] = True
                self.see(barrier, np.array(lanes))
            else:
                self.failed = np.zeros(m.lanes, bool) if self.failed is None else self.failed
                self.failed[lanes] = True
                self.looked = number
                self.awaited.add(place)
        return seen

    # ---- phases

    def end_phase(self, barrier: Barrier) -> None:
        if barrier.pending <= 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.arrived, barrier.arriving = barrier.arriving, 0
            barrier.pending = barrier.count
            self.version += 1

    def deliver(self) -> None:
        """Let copies come that are waited for, in the order in which they were asked for, until a phase has ended."""
        for barrier in [self.at[place] for place in self.awaited if place in self.at]:
            phase = barrier.phase
            while barrier.coming and barrier.phase == phase:
                copy = barrier.coming.pop(0)
                copy.arrive()
                copy.phase = phase
                barrier.come.append(copy)
                barrier.bytes -= copy.size
                self.version += 1
                self.end_phase(barrier)
        self.awaited.clear()

    def see(self, barrier: Barrier, lanes: Any) -> None:
        """Some threads have seen that the phase ended: their warps may touch what came with it."""
        shared = self.machine.shared
        warps = u32(np.bitwise_or.reduce(1 << np.unique(self.machine.warp_in_block[lanes])))
        for copy in barrier.come:
            if copy.phase < barrier.phase:
                shared.unseen[copy.index] &= ~warps
                copy.seen = True
        if shared.unseen is not None:  # whoever arrived passes on what it has seen
            shared.unseen[(~shared.unseen & u32(barrier.arrived)) != 0] &= ~warps
        barrier.come = [copy for copy in barrier.come if shared.unseen[copy.index].any()]

    def fence(self, there: Any) -> None:
        """Blocks have passed a fence.proxy.async: bulk copies know their mbarriers."""
        for place, barrier in self.at.items():
            barrier.fenced |= bool(there[place * 8 // self.machine.shared.stride])

    def meet(self, free: Any) -> None:
        """All threads of some blocks met: what one has seen, all have."""
        for barrier in self.at.values():
            kept = []
            for copy in barrier.come:
                if copy.seen and free[copy.block]:
                    self.machine.shared.unseen[copy.index] = 0
                else:
                    kept.append(copy)
            barrier.come = kept

    def take_failed(self) -> Any:
        failed, self.failed = self.failed, None
        return failed

    def end(self) -> None:
        for place, barrier in self.at.items():
            for copy in barrier.coming:
                self.refuse("ends with a copy to shared memory under way", copy.number, copy.lane, place)
