"""Count in TTGIR how many times an element of a product is computed, and read the steps of loops.

A layout spreads a tensor over the warps of a block: each computes instrShape (a tensor core's instruction) or
sizePerThread x threadsPerWarp (plain cores), and warpsPerCTA is the number of warps along each dimension. If these
reach beyond the tensor, as 8 warps of 16 rows over 64 rows, warps compute the same elements again, and all that is
computed of the result, such as the exponentials of scores, is repeated too.

Of a kernel with loops only their products count: all others run once. On sm_100 products are in tensor memory, which
has no layout of warps, and are not seen.
"""

import math
import re
from typing import NamedTuple

_ALIAS = re.compile(r"^(#\w+) = #ttg\.(nvidia_mma|blocked)<\{(.*)\}>$", re.MULTILINE)
_DOT = re.compile(
    r"^( *).*\b(?:tt\.dot|warp_group_dot)\b.*: .*?(?:tensor|memdesc)<([\dx]+)x.*-> tensor<([\dx]+)x\w+, (#\w+)>",
    re.MULTILINE,
)
_CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d+) : i(?:32|64)\b")
_FOR = re.compile(r"\bscf\.for .* step (%\w+)\b")


class Product(NamedTuple):
    """One product in the text: its multiply-adds, how many times it is computed, its indentation."""

    multiply_adds: int
    times: float
    indent: int


def _numbers(text: str, name: str) -> list[int]:
    match = re.search(rf"\b{name} = \[([\d, ]+)\]", text)
    return [int(number) for number in match[1].split(",")] if match else []


def _reach(kind: str, text: str) -> list[int]:
    """Return how many elements along each dimension the warps of a layout compute at once."""
    warps = _numbers(text, "warpsPerCTA")
    if kind == "blocked":
        factors = (_numbers(text, "sizePerThread"), _numbers(text, "threadsPerWarp"), warps)
        return [math.prod(each) for each in zip(*factors, strict=True)]
    shape = _numbers(text, "instrShape")
    shape = shape[:2] if "versionMajor = 3" in text else shape[-2:]  # wgmma's names the inner dimension, too
    return [a * b for a, b in zip([1] * (len(warps) - 2) + shape, warps, strict=True)]


def products(ttgir: str) -> list[Product]:
    """Return the products of a kernel in the order of the text."""
    reach = {name: _reach(kind, text) for name, kind, text in _ALIAS.findall(ttgir)}
    results = []
    for space, a, result, layout in _DOT.findall(ttgir):
        shape = [int(size) for size in result.split("x")]
        times = math.prod(max(1.0, extent / size) for extent, size in zip(reach[layout], shape, strict=True))
        results.append(Product(math.prod(shape) * int(a.split("x")[-1]), times, len(space)))
    return results


def replication(ttgir: str) -> float:
    """Return how many times the elements of a kernel's products are computed: the mean over its multiply-adds."""
    every = products(ttgir)
    outside = min((each.indent for each in every), default=0)
    counted = [each for each in every if each.indent > outside] or every
    total = sum(each.multiply_adds for each in counted)
    return round(sum(each.multiply_adds * each.times for each in counted) / total, 3) if total else 1.0


def steps(ttgir: str) -> list[int]:
    """Return the step of each innermost loop with exponentials; 1 if it is no constant.

    Triton unrolls a loop (`loop_unroll_factor`) by multiplying its step.
    """
    constants = {name: int(value) for name, value in _CONSTANT.findall(ttgir)}
    loops: list[tuple[int, int]] = []  # line and step
    open_loops: list[tuple[int, int, int]] = []  # indentation, line and step
    for number, line in enumerate(ttgir.splitlines()):
        indent = len(line) - len(line.lstrip())
        if begins := _FOR.search(line):
            open_loops.append((indent, number, constants.get(begins[1], 1)))
        elif open_loops and indent == open_loops[-1][0] and line.lstrip().startswith("}"):
            open_loops.pop()
        elif open_loops and "math.exp2" in line and (loop := open_loops[-1][1:]) not in loops:
            loops.append(loop)
    return [step for _, step in sorted(loops)]
