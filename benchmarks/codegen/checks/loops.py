"""What the loops of a kernel cost for each element of work, read from SASS: instructions, exponentials, tensor cores.

An element is a score, or a logit: what the tile of a loop's step has. Of each innermost loop that takes exponentials,
in the order of the text (attention's forward kernel has two: whole tiles, and tiles with masks):

- warp instructions for 4,096 elements, those of all warps of the block; a predicated one counts, and so does what most
  iterations branch over (the masks of attention's backward). A multiprocessor issues four in a cycle, so a quarter of
  it is cycles of its schedulers;
- exponentials (MUFU.EX2) for an element; a multiprocessor takes 16 in a cycle (CUDA C++ Programming Guide, table of
  arithmetic throughput), on sm_80 and on sm_90;
- cycles of a multiprocessor's tensor cores for 4,096 elements, by the table below.

**Cycles of an instruction.** An A100 multiplies and adds 1,024 pairs of 16 bits in a cycle of a multiprocessor, half as
many tf32 (312 and 156 TFLOP/s, 108 multiprocessors, 1.41 GHz: NVIDIA A100 whitepaper, table 1); an H100 2,048 and
1,024 by wgmma (989 and 495 TFLOP/s, 132 multiprocessors, 1.83 GHz: NVIDIA H100 whitepaper, table 2). Instructions of
8 bits run at twice the rate of 16. mma.sync on sm_90 is counted at A100's rate: half of wgmma's (Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture": 62 % of it is the most they reached).

These are counts, no times: what waits for what is not in them.
"""

import math
import re
from typing import Any, NamedTuple

from benchmarks.codegen.checks.flow import blocks, inner_loops
from benchmarks.codegen.checks.layouts import steps

PAIRS = 4096  # of 64 queries and 64 keys
# Which numbers of a kernel's configuration make the tile of a step, by the kernel's name; those of the loss step by
# their tile. The feed-forward kernels have no such loop of their own: their time is their memory traffic.
TILES = {
    "_attention": ("BLOCK_T", "BLOCK_S"),
    "_attention_keys_values": ("BLOCK_T", "BLOCK_S"),
    "_attention_queries": ("BLOCK_T", "BLOCK_S"),
    "_attention_mask_gradient": ("BLOCK_T", "BLOCK_S"),
    "cross_entropy_kernel": (),
    "cross_entropy_gradients_kernel": (),
}
# Multiply-adds of 16 bits in a cycle of a multiprocessor.
MMA_RATE = {"HMMA": 1024, "HGMMA": 2048}

_EX2 = re.compile(r"\bMUFU\.EX2\b")
_EX2_PTX = re.compile(r"\bex2\.approx\b")
_HMMA = re.compile(r"\bHMMA\.(16816|1688|1684)\.\S*?(TF32)?\s")
_HGMMA = re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\.\S*?(TF32)?\s")


def tile_of(kernel: str, constants: dict[str, Any]) -> int:
    """Return the elements of work of a unit of the step of a kernel's loops, or 0 if it has no loops to count."""
    return math.prod(constants[name] for name in TILES[kernel]) if kernel in TILES else 0


class Loop(NamedTuple):
    """What a loop costs, as the top of this file says. What an executor counts may join."""

    instructions: float  # of warps, for 4,096 elements
    exponentials: float  # for an element
    mma_cycles: float  # of a multiprocessor, for 4,096 elements


def mma_cycles(instruction: str, warps: int) -> float:
    """Return the cycles of a multiprocessor's tensor cores that an instruction takes, run by all warps of a block."""
    if found := _HGMMA.search(instruction):
        multiply_adds = math.prod(int(found[i]) for i in (1, 2, 3)) * warps / 4  # of a warpgroup
        return multiply_adds / MMA_RATE["HGMMA"] * (2 if found[4] else 1)
    if found := _HMMA.search(instruction):
        multiply_adds = 16 * 8 * int(found[1][3:]) * warps
        return multiply_adds / MMA_RATE["HMMA"] * (2 if found[2] else 1)
    return 0.0


def bodies(text: str, exponential: re.Pattern[str]) -> list[list[str]]:
    """Return the instructions of each innermost loop of PTX or SASS that takes exponentials."""
    found = blocks(text)
    loops = ([line for number in sorted(loop) for line in found[number].instructions] for loop in inner_loops(found))
    return [body for body in loops if any(exponential.search(line) for line in body)]


def loop_figures(ttgir: str, ptx: str, sass: str, tile: int, warps: int) -> list[Loop]:
    """Return the figures of a kernel's loops.

    Args:
        ttgir, ptx, sass: the kernel's text in each stage.
        tile: elements of work for each unit of the loop's step.
        warps: of a block.

    Raises:
        ValueError: the stages have not the same loops, so that what an iteration does is unknown.
    """
    in_sass, in_ptx, step = bodies(sass, _EX2), bodies(ptx, _EX2_PTX), steps(ttgir)
    if not len(in_sass) == len(in_ptx) == len(step):
        raise ValueError(f"loops with exponentials: {len(step)} in TTGIR, {len(in_ptx)} in PTX, {len(in_sass)} in SASS")
    figures = []
    for body, asked, width in zip(in_sass, in_ptx, step, strict=True):
        taken, wanted = (
            sum(bool(_EX2.search(line) or _EX2_PTX.search(line)) for line in each) for each in (body, asked)
        )
        if taken % wanted:
            raise ValueError(f"a loop takes {wanted} exponentials in PTX, {taken} in SASS: not a number of iterations")
        elements = tile * width * (taken // wanted)  # ptxas may unroll, too
        cycles = sum(mma_cycles(line, warps) for line in body)
        issued = sum(not line.startswith("NOP") for line in body) * warps
        share = PAIRS / elements
        figures.append(
            Loop(round(issued * share, 1), round(taken * warps * 32 / elements, 4), round(cycles * share, 1))
        )
    return figures
