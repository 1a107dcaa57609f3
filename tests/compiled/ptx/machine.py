"""Run a kernel, a few of its blocks at a time: all their threads as one numpy array, in step.

Diverged threads go on at the lowest block of instructions that any of them has reached, so they meet where ways meet.
A barrier lets the threads of a block go on when all that live have come to it. What is wrong is reported with kernel,
line of PTX and of source, block, thread and address, and ends the run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import UINT
from tests.compiled.ptx.global_memory import Allocation, GlobalMemory
from tests.compiled.ptx.program import Program
from tests.compiled.ptx.shared_memory import BASE, Copies, SharedMemory
from tests.compiled.ptx.text import WIDTHS, PtxError
from tests.compiled.ptx.warps import Warps
from tests.compiled.ptx.wgmma import Wgmma

Grid = tuple[int, int, int]


@dataclass
class Options:
    """What a run checks."""

    races_shared: bool = False  # of warps of a block; and fences
    races_global: bool = False  # of blocks of a launch
    lanes: int = 4096  # of blocks that run together
    steps: int = 50_000_000  # basic blocks of a launch, against endless loops


class KernelFault(Exception):
    """The kernel did what it must not."""


class Machine:
    """Some blocks of a launch."""

    def __init__(
        self, program: Program, params: list[Any], blocks: Any, grid: Grid, memory: GlobalMemory, options: Options
    ) -> None:
        self.program, self.params, self.grid, self.options = program, params, grid, options
        self.threads, self.blocks = program.kernel.threads, len(blocks)
        self.lanes = self.threads * self.blocks
        self.every = np.arange(self.lanes)
        self.block_of_lane = np.repeat(np.arange(self.blocks), self.threads)
        self.block_of = np.repeat(np.asarray(blocks), self.threads).astype(np.int32)  # of the grid
        self.thread = np.tile(np.arange(self.threads), self.blocks)
        self.warp_in_block = self.thread // 32
        self.epochs = np.zeros(self.blocks, np.int64)  # barriers that each block has passed
        self.memory = memory
        memory.machine = self
        self.shared = SharedMemory(self, program.shared)
        self.warps, self.copies, self.wgmma = Warps(self), Copies(self), Wgmma(self)
        self.specials: dict[tuple[str, int], Any] = {}
        self.registers: list[Any] = [None] * len(program.kernel.widths)

    # ---- what instructions ask

    def of_threads(self, x: Any) -> Any:
        """An element a thread, of what may be one for all."""
        return np.broadcast_to(x, (self.lanes,))

    def here(self, mask: Any) -> Any:
        """Which threads take part."""
        return self.of_threads(True if mask is None else mask)

    def active(self, mask: Any, address: Any) -> tuple[Any, Any]:
        """Return the threads that take part, and what each of them has."""
        lanes = self.every if mask is None else np.flatnonzero(self.of_threads(mask))
        return lanes, self.of_threads(address)[lanes]

    def special(self, name: str, width: int) -> Any:
        key = (name, width)
        if key not in self.specials:
            self.specials[key] = self._special(name).astype(UINT[width])
        return self.specials[key]

    def _special(self, name: str) -> Any:
        x, y, z = self.grid
        block = self.block_of if self.blocks > 1 else self.block_of[:1]
        of_threads = {
            "%tid.x": self.thread, "%ctaid.x": block % x, "%ctaid.y": block // x % y, "%ctaid.z": block // (x * y),
        }  # fmt: skip
        of_all = {"%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z}
        if name not in of_threads and name not in of_all:
            raise PtxError(name)
        return of_threads[name] if name in of_threads else np.array([of_all[name]])

    def variable(self, name: str, width: int) -> Any:
        offsets = {"global_smem": 0} | self.program.kernel.shared.offsets
        if name not in offsets:
            raise PtxError(f"no such operand here: {name}")
        return np.array([BASE + offsets[name]], UINT[width])

    def refuse(self, bad: Any, kind: str, number: int, lanes: Any, address: Any, detail: str = "") -> None:
        """Raise KernelFault if `bad` marks an access.

        Args:
            lanes: whose accesses they are.
            address: of each, or one for all.
        """
        rows = np.flatnonzero(bad)
        if len(rows) == 0:
            return
        ins = self.program.ins[number]
        lane = int(lanes[rows[0]])
        where = int(address[rows[0]] if len(address) > 1 else address[0])
        raise KernelFault(
            f"{self.program.kernel.name}: {kind}{f' ({detail})' if detail else ''}, PTX line {ins.line} "
            f"[{ins.source}]: {ins.text[:120]}; block {self.block_of[lane]} thread {self.thread[lane]} of {len(rows)}, "
            f"address {where:#x}"
        )

    # ---- the run

    def run(self) -> None:
        """Run to the end."""
        program, R = self.program, self.registers
        self.pending: dict[int, Any] = {0: np.ones(self.lanes, bool)}  # basic block -> who is there
        self.waiting: dict[int, Any] = {}  # at the barrier before that block
        self.live = self.pending[0]  # replaced, never changed in place
        everybody = True
        for _ in range(self.options.steps):
            if not self.pending:
                break
            n = min(self.pending)
            mask = self.pending.pop(n)
            full = mask is self.live or np.array_equal(mask, self.live)
            function = program.block(n, not full)
            m = None if full and everybody else mask
            try:
                branch = function(self, R, m)
            except KernelFault:
                raise
            except Exception as error:
                program.explain(error)
            everybody &= not self.leave(n, mask, branch)
        else:
            raise KernelFault(f"{program.kernel.name}: more than {self.options.steps} steps: does it end?")
        if self.waiting:
            lanes = np.flatnonzero(np.logical_or.reduce(list(self.waiting.values())))
            raise KernelFault(f"{program.kernel.name}: threads wait at a barrier that others never reach: {lanes[:4]}")
        if self.wgmma.pending:
            self.refuse([True], "ends with a wgmma that nobody waited for", self.wgmma.pending[0].number, [0], [0])

    def add(self, n: int, mask: Any) -> None:
        self.pending[n] = mask if n not in self.pending else self.pending[n] | mask

    def leave(self, n: int, mask: Any, branch: Any) -> bool:
        """Send the threads on from the end of a basic block; return whether some have ended."""
        kind, to, conditional = self.program.ends[n]
        if conditional:
            branch = self.of_threads(branch)
            taken, left = mask & branch, mask & ~branch
            if not taken.any():
                self.add(n + 1, mask)
                return False
            if left.any():
                self.add(n + 1, left)
                mask = taken
        if kind == "ret":
            self.live = self.live & ~mask
            self.release()
            return True
        if kind == "bar":
            self.waiting[to] = mask if to not in self.waiting else self.waiting[to] | mask
            self.release()
        else:
            self.add(to, mask)
        return False

    def release(self) -> None:
        """Let the blocks go on whose live threads have all arrived at one barrier."""
        for barrier in {self.program.barrier[to] for to in self.waiting}:
            here = [to for to in self.waiting if self.program.barrier[to] == barrier]
            arrived = np.logical_or.reduce([self.waiting[to] for to in here])
            there, expected = (x.reshape(self.blocks, -1).sum(1) for x in (arrived & self.live, self.live))
            free = (there == expected) & (there > 0)
            if not free.any():
                continue
            self.epochs = self.epochs + free
            lanes = np.repeat(free, self.threads)
            for to in here:
                going, rest = self.waiting[to] & lanes, self.waiting[to] & ~lanes
                if going.any():
                    self.add(to, going)
                if rest.any():
                    self.waiting[to] = rest
                else:
                    del self.waiting[to]


def launch(program: Program, grid: Grid, values: list[int], allocations: list[Allocation], options: Options) -> None:
    """Run all blocks. `values`: the bits of the parameters, in order.

    Blocks with wgmma run one by one, as its operands and groups belong to a block; others together up to
    `options.lanes` threads, which costs numpy as much as one.

    Raises:
        KernelFault: the kernel did what it must not.
        PtxError: it needs what is not there.
    """
    params = [np.array([v], UINT[WIDTHS[t]]) for (t, _), v in zip(program.kernel.params, values, strict=True)]
    total = grid[0] * grid[1] * grid[2]
    together = 1 if program.uses_wgmma else max(1, options.lanes // program.kernel.threads)
    memory = GlobalMemory(allocations)
    with np.errstate(all="ignore"):
        for first in range(0, total, together):
            blocks = range(first, min(first + together, total))
            Machine(program, params, blocks, grid, memory, options).run()
