"""Facts about the compiler's view of the kernels, found without a GPU; a program, as the interpreter must be off.

python tests/kernels/facts/kernel_facts.py   # products of indices in 32 bits that end up in an address; JSON

**Offsets.** A tensor may have 2^31 elements and more, so an index times a stride needs 64 bits. In the first form of a
kernel that Triton keeps (ttir, helpers inlined, constants folded) the rule is: in 32 bits, nothing that an address
depends on is
- a product of two numbers that are not constants, of which one comes from an argument (a stride, or a size); nor
- a product of a constant and what already contains a product, or was loaded: (program * BLOCK + i) * WIDTH.
Quotients, remainders, what a loop counts and what is multiplied in 64 bits are indices: what they are made of is not
looked at.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ARCH = 90


class Value(NamedTuple):
    """What an instruction of a kernel computes, from which other values."""

    text: str
    op: str
    operands: list[int]


NAME = r"%[\w$.-]+"
# What is computed from these is an index or a number of its own, not a part of a product.
CUT = {"tt.load", "tt.reduce", "loop", "arith.cmpi", "arith.cmpf"}
CUT |= {f"arith.{op}" for op in ("divsi", "divui", "remsi", "remui", "floordivsi", "ceildivsi")}


def parse(ttir: str) -> list[Value]:
    """Read a kernel; the operands of what a loop carries are its first and its next value."""
    values: list[Value] = []
    names: dict[str, int] = {}
    regions: list[list[list[int]]] = []  # for each open brace, what its yields go to: results, and a loop's variables

    def define(name: str, op: str, text: str, operands: list[int]) -> int:
        values.append(Value(text, op, operands))
        names[name] = len(values) - 1
        return len(values) - 1

    def known(text: str) -> list[int]:
        return [names[name] for name in re.findall(rf"{NAME}(?:#\d+)?", text) if name in names]

    for line in ttir.splitlines():
        text = re.sub(r" loc\(.*\)$", "", line.strip())
        if text.startswith("}") and not text.endswith("{"):
            regions.pop()
        elif text.startswith("tt.func"):
            for name in re.findall(rf"({NAME}): ", text):
                define(name, "argument", text, [])
            regions.append([[], []])
        elif text.startswith("^bb"):
            for name in re.findall(rf"({NAME}): ", text):
                define(name, "block", text, [])
        elif text.startswith("scf.yield"):
            for i, operand in enumerate(known(text.split(" : ")[0])):
                for targets in regions[-1]:
                    if i < len(targets):
                        values[targets[i]].operands.append(operand)
        elif match := re.match(rf"(?:({NAME})(?::(\d+))? = )?\"?([\w.]+)\"?(.*)", text):
            name, count, op, rest = match[1], int(match[2] or 1), match[3], match[4]
            operands = known(rest.split(" : ")[0])
            variables, firsts = [], []
            if loop := re.match(rf"(?: unsigned)? ({NAME}) = ", rest) if op == "scf.for" else None:
                carried = re.findall(rf"({NAME}) = ({NAME}(?:#\d+)?)", rest[loop.end() :])
                firsts = [known(first) for _, first in carried]
                bounds = known(rest[loop.end() :].split(" iter_args")[0].split(" : ")[0])
                define(loop[1], "loop", text, bounds)
                variables = [
                    define(variable, "carried", text, [*first])
                    for (variable, _), first in zip(carried, firsts, strict=True)
                ]
            results = []
            for i in range(count if name else 0):
                full = name if count == 1 else f"{name}#{i}"
                results.append(define(full, op, text, [*firsts[i]] if loop else [*operands]))
            if text.endswith("{"):
                regions.append([results, variables])
                continue
    return values


def narrow_offsets(ttir: str) -> Iterator[str]:
    """Yield each instruction that breaks the rule at the top of this file."""
    values = parse(ttir)

    def product(value: Value, bits: int) -> bool:
        return value.op == "arith.muli" and value.text.endswith((f"i{bits}", f"i{bits}>"))

    def sources(start: int) -> set[int]:
        seen: set[int] = set()
        stack = [start]
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                value = values[index]
                stack += [] if value.op in CUT or product(value, 64) else value.operands
        return seen

    def ops(start: int) -> set[str]:
        return {values[i].op for i in sources(start)}

    def constant(start: int) -> bool:
        return not ops(start) - {"arith.constant", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape"}

    reached: set[int] = set()
    for value in values:
        if value.op == "tt.addptr":
            reached |= sources(value.operands[1])
    for index in sorted(reached):
        value = values[index]
        if not product(value, 32):
            continue
        a, b = value.operands
        if constant(a) or constant(b):
            other = ops(b if constant(a) else a)
            if "tt.load" in other or ("arith.muli" in other and other & {"tt.get_program_id", "loop"}):
                yield f"scaled twice: {value.text}"
        elif "argument" in ops(a) | ops(b):
            yield f"index times size: {value.text}"


def ttir(job) -> str:
    """Compile a recorded launch as far as its ttir."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from benchmarks.codegen.compilation import source_of

    class Done(Exception):
        pass

    def stop(module, *_):
        raise Done(str(module))

    before = CUDABackend.make_ttgir
    CUDABackend.make_ttgir = staticmethod(stop)
    try:
        source, target = source_of(job)
        return triton.compile(source, target=target, options=job.options).asm["ttir"]
    except Done as done:
        return str(done)
    finally:
        CUDABackend.make_ttgir = before


def offsets() -> dict[str, list[str]]:
    """Check every launch that the launchers can choose, and the deliberate faults; for each, what breaks the rule."""
    from benchmarks.codegen.compilation import find_cases, record
    from tests.kernels.facts.offset_kernels import offset_cases

    rows, faults = record([*find_cases("benchmarks.codegen.cases"), *offset_cases()], ARCH)
    if faults:
        raise RuntimeError("\n".join(faults))
    actual: dict[str, list[str]] = {}
    seen = set()
    for row in rows:
        # Dtypes and sizes of tiles make no other addresses.
        key = row.kernel, *(value for value in map(str, row.job.constants.values()) if not value.isdecimal())
        if key not in seen:
            seen.add(key)
            actual.setdefault(row.kernel, []).extend(narrow_offsets(ttir(row.job)))
    return actual


if __name__ == "__main__":
    print(json.dumps(offsets()))
