"""Count the cost of a kernel's loops for each element of work, in SASS: instructions, exponentials, tensor cores.

An element is a score or a logit, one of the tile of a loop's step. Counted is each innermost loop with exponentials, in
the order of the text (attention's forward kernel has two: whole tiles, and tiles with masks):

- warp instructions for 4,096 elements, of all warps of the block; predicated ones count, and branches that most
  iterations do not take (the masks of attention's backward). A multiprocessor issues four in a cycle;
- exponentials (MUFU.EX2) for an element; a multiprocessor computes 16 in a cycle (CUDA C++ Programming Guide, table of
  arithmetic throughput), on sm_80 and on sm_90;
- cycles of a multiprocessor's tensor cores for 4,096 elements, by the table below.

**Cycles of an instruction.** An A100 multiplies and adds 1,024 pairs of 16 bits in a cycle of a multiprocessor, half as
many tf32 (312 and 156 TFLOP/s, 108 multiprocessors, 1.41 GHz: NVIDIA A100 whitepaper, table 1); an H100 2,048 and
1,024 by wgmma (989 and 495 TFLOP/s, 132 multiprocessors, 1.83 GHz: NVIDIA H100 whitepaper, table 2). Instructions of
8 bits run at twice the rate of 16. mma.sync on sm_90 is counted at A100's rate: half of wgmma's (Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture": 62 % of it is the most they reached).

These are counts, no times: dependencies between instructions are not in them.
"""

import math
import re
from typing import Any, NamedTuple

from benchmarks.codegen.checks.flow import blocks, inner_loops
from benchmarks.codegen.checks.layouts import steps

PAIRS = 4096  # of 64 queries and 64 keys
# Constants of a kernel whose product is the tile of a step; loops of the loss step by their tile. The feed-forward
# kernels have no such loop: their time is their memory traffic.
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
    """The cost of a loop, as the top of this file defines it."""

    instructions: float  # of warps, for 4,096 elements
    exponentials: float  # for an element
    mma_cycles: float  # of a multiprocessor, for 4,096 elements


def mma_cycles(instruction: str, warps: int) -> float:
    """Return the cycles of a multiprocessor's tensor cores that an instruction takes, run by all warps of a block."""
    if match := _HGMMA.search(instruction):
        multiply_adds = math.prod(int(match[i]) for i in (1, 2, 3)) * warps / 4  # of a warpgroup
        return multiply_adds / MMA_RATE["HGMMA"] * (2 if match[4] else 1)
    if match := _HMMA.search(instruction):
        multiply_adds = 16 * 8 * int(match[1][3:]) * warps
        return multiply_adds / MMA_RATE["HMMA"] * (2 if match[2] else 1)
    return 0.0


def bodies(text: str, exponential: re.Pattern[str]) -> list[list[str]]:
    """Return the instructions of each innermost loop of PTX or SASS with exponentials."""
    code = blocks(text)
    loops = ([line for number in sorted(loop) for line in code[number].instructions] for loop in inner_loops(code))
    return [body for body in loops if any(exponential.search(line) for line in body)]


def loop_figures(ttgir: str, ptx: str, sass: str, tile: int, warps: int) -> list[Loop]:
    """Return the figures of a kernel's loops; `tile` is the number of elements of a unit of the loop's step.

    Raises:
        ValueError: the stages have different loops, so that the work of an iteration is unknown.
    """
    in_sass, in_ptx, step = bodies(sass, _EX2), bodies(ptx, _EX2_PTX), steps(ttgir)
    if not len(in_sass) == len(in_ptx) == len(step):
        raise ValueError(f"loops with exponentials: {len(step)} in TTGIR, {len(in_ptx)} in PTX, {len(in_sass)} in SASS")
    figures = []
    for body, ptx_body, width in zip(in_sass, in_ptx, step, strict=True):
        exponentials = sum(bool(_EX2.search(line)) for line in body)
        of_iteration = sum(bool(_EX2_PTX.search(line)) for line in ptx_body)
        if exponentials % of_iteration:
            message = f"a loop takes {of_iteration} exponentials in PTX, {exponentials} in SASS"
            raise ValueError(f"{message}: not a number of iterations")
        elements = tile * width * (exponentials // of_iteration)  # ptxas may unroll, too
        cycles = sum(mma_cycles(line, warps) for line in body)
        issued = sum(not line.startswith("NOP") for line in body) * warps
        counts = (issued * PAIRS / elements, exponentials * warps * 32 / elements, cycles * PAIRS / elements)
        figures.append(Loop(*(round(count, digits) for count, digits in zip(counts, (1, 4, 1), strict=True))))
    return figures
