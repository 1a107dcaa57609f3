"""Run a kernel: a few of its blocks at a time, one after the other."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tests.compiled.ptx.arithmetic import UINT
from tests.compiled.ptx.counters import Traffic
from tests.compiled.ptx.global_memory import Allocation, GlobalMemory
from tests.compiled.ptx.machine import Findings, Machine, Options
from tests.compiled.ptx.program import Program
from tests.compiled.ptx.text import WIDTHS


@dataclass
class Report:
    """What a launch did."""

    name: str
    grid: tuple[int, int, int]
    seconds: float
    counters: Counter[str]
    traffic: dict[tuple[str, int, str], Traffic]  # by memory, line of PTX and of source; with `memory_traffic`
    findings: Findings
    uses_wgmma: bool
    lines: set[int]  # of the PTX: those of the basic blocks that ran


def launch(
    program: Program,
    grid: tuple[int, int, int],
    values: list[int],
    allocations: list[Allocation],
    options: Options,
) -> Report:
    """Run all blocks. `values`: the bits of the parameters, in order.

    Blocks with wgmma run one by one, as its operands and groups belong to a block; others together up to
    `options.lanes` threads, which costs numpy as much as one.

    Raises:
        KernelFault: the kernel did what it must not, unless that is to be noted.
        PtxError: it needs what is not there.
    """
    start = time.perf_counter()
    counters: Counter[str] = Counter()
    traffic: dict[tuple[str, int, str], Traffic] = {}
    findings: Findings = {}
    lines: set[int] = set()
    kernel = program.kernel
    params = [np.array([v], UINT[WIDTHS[t]]) for (t, _), v in zip(kernel.params, values, strict=True)]
    total = grid[0] * grid[1] * grid[2]
    together = 1 if program.uses_wgmma else max(1, options.lanes // kernel.threads)
    memory = GlobalMemory(allocations)
    with np.errstate(all="ignore"):
        for first in range(0, total, together):
            blocks = range(first, min(first + together, total))
            machine = Machine(program, params, blocks, grid, memory, options)
            ran = machine.run()
            counters += machine.counters
            for (space, number), found in machine.traffic.items():
                place = space, program.ins[number].line, program.ins[number].source
                traffic[place] = traffic.get(place, Traffic()) + found
            for key, (text, count) in machine.findings.items():
                findings.setdefault(key, [text, 0])[1] += count
            lines |= {i.line for n in ran for i in kernel.blocks[n].ins}
    return Report(
        kernel.name, grid, time.perf_counter() - start, counters, traffic, findings, program.uses_wgmma, lines
    )
