"""Replicated work, and the steps of loops, read from TTGIR: how many times an element of a product is computed.

A layout spreads a tensor over the warps of a block: each computes instrShape (a tensor core's instruction) or
sizePerThread x threadsPerWarp (plain cores), and warpsPerCTA says how many warps lie along each dimension. Where these
reach beyond the tensor, as 8 warps of 16 rows do over 64 rows, warps compute the same elements once more, and all that
is computed of the result, the exponentials of scores for one, is repeated with it.

Of a kernel with loops only their products count: what is before or after them runs once. On sm_100 products lie in
tensor memory, which is no layout of warps, and are not seen.
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
    """One product in the text: its multiply-adds, how many times it is computed, how far in it stands."""

    multiply_adds: int
    times: float
    indent: int


def _numbers(text: str, name: str) -> list[int]:
    found = re.search(rf"\b{name} = \[([\d, ]+)\]", text)
    return [int(number) for number in found[1].split(",")] if found else []


def _reach(kind: str, text: str) -> list[int]:
    """Return how many elements along each dimension the warps of a layout compute at once."""
    warps = _numbers(text, "warpsPerCTA")
    if kind == "blocked":
        parts = (_numbers(text, "sizePerThread"), _numbers(text, "threadsPerWarp"), warps)
        return [math.prod(each) for each in zip(*parts, strict=True)]
    shape = _numbers(text, "instrShape")
    shape = shape[:2] if "versionMajor = 3" in text else shape[-2:]  # wgmma's names the inner dimension, too
    return [a * b for a, b in zip([1] * (len(warps) - 2) + shape, warps, strict=True)]


def products(ttgir: str) -> list[Product]:
    """Return the products of a kernel in the order of the text."""
    reach = {name: _reach(kind, text) for name, kind, text in _ALIAS.findall(ttgir)}
    found = []
    for space, a, result, layout in _DOT.findall(ttgir):
        shape = [int(size) for size in result.split("x")]
        times = math.prod(max(1.0, part / size) for part, size in zip(reach[layout], shape, strict=True))
        found.append(Product(math.prod(shape) * int(a.split("x")[-1]), times, len(space)))
    return found


def replication(ttgir: str) -> float:
    """Return how many times the elements of a kernel's products are computed: the mean over its multiply-adds."""
    found = products(ttgir)
    outside = min((each.indent for each in found), default=0)
    found = [each for each in found if each.indent > outside] or found
    total = sum(each.multiply_adds for each in found)
    return round(sum(each.multiply_adds * each.times for each in found) / total, 3) if total else 1.0


def steps(ttgir: str) -> list[int]:
    """Return the step of each innermost loop that takes exponentials; 1 where it is no constant.

    Triton unrolls a loop (`loop_unroll_factor`) by multiplying its step.
    """
    constants = {name: int(value) for name, value in _CONSTANT.findall(ttgir)}
    found: list[tuple[int, int]] = []  # where the loop stands, its step
    open_loops: list[tuple[int, int, int]] = []  # indentation besides
    for number, line in enumerate(ttgir.splitlines()):
        indent = len(line) - len(line.lstrip())
        if begins := _FOR.search(line):
            open_loops.append((indent, number, constants.get(begins[1], 1)))
        elif open_loops and indent == open_loops[-1][0] and line.lstrip().startswith("}"):
            open_loops.pop()
        elif open_loops and "math.exp2" in line and (place := open_loops[-1][1:]) not in found:
            found.append(place)
    return [step for _, step in sorted(found)]
