"""Limits for the compiled kernels of every Triton version, and the recorded budget of some.

**Limits**: it compiles; no stack (spilled registers are there); shared memory that a block can get; at least one block
on a multiprocessor; no product computed more than once; on sm_90 products of 16 bits or tf32 are wgmma, not serialised,
that read nothing written without a fence (`reader.py`, `checks/`). Exceptions are in the budget file: {"rows": pattern
of row names, "limit": compiles | stack | shared | registers | replicated | wgmma | serialised | fences, "reason": why,
"triton": pattern of versions, if not all}.

**The budget** has the resources of each row when the file was written. With that Triton version a check fails for 10 %
more registers, fewer blocks per multiprocessor, more shared memory, no asynchronous copies any more, products computed
more often, loops with more exponentials, more cycles of tensor cores or 3 % more instructions for an element of work,
and rows that are new, gone, configured otherwise, or recorded from other sources. With another version, or another
ptxas, only the limits hold.
"""

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.codegen.checks.loops import Loop
from benchmarks.codegen.compilation import GPUS, Row
from benchmarks.codegen.reader import Resources

BUDGET = Path(__file__).resolve().with_name("budget.json")
MORE_REGISTERS = 1.10  # ptxas releases differ by a few registers
# A change elsewhere in a kernel moves a few address computations into a loop: 3 % are 10 of its 350 to 700
# instructions. A mask, or a conversion of layouts, is 30 and more.
MORE_INSTRUCTIONS = 1.03


def broken_limits(arch: int | str, result: Resources | str) -> Iterator[tuple[str, str]]:
    """Yield the limits that a result breaks: the limit's name, and a sentence."""
    if isinstance(result, str):
        yield "compiles", f"does not compile: {result}"
        return
    if result.stack:
        yield "stack", f"{result.stack} bytes of stack: it spills"
    if result.shared > (limit := GPUS[arch].shared_of_block):
        yield "shared", f"{result.shared} bytes of shared memory, and a block gets at most {limit}"
    if result.ctas == 0 and result.shared <= limit:
        yield "registers", f"no block fits on a multiprocessor with {result.registers} registers a thread"
    if result.other_dots:
        yield "wgmma", f"{result.other_dots} products of 16 bits or tf32 are not wgmma"
    if result.replication > 1.0:
        yield "replicated", f"its products are computed {result.replication} times"
    if result.unfenced:
        yield "fences", f"{result.unfenced} products may read what was written without a fence.proxy.async since"
    if result.serialised:
        yield "serialised", f"its {result.wgmma} wgmma are serialised"


def worse_loops(after: tuple[Loop, ...], before: tuple[Loop, ...]) -> Iterator[str]:
    """Yield what is worse in a kernel's loops."""
    if len(after) != len(before):
        yield f"loops {len(before)} -> {len(after)}"
        return
    units = ("instructions", "4,096 elements"), ("exponentials", "an element"), ("tensor core cycles", "4,096 elements")
    for number, (now, then) in enumerate(zip(after, before, strict=True), start=1):
        for (name, unit), new, old in zip(units, now, then, strict=True):
            if new > old * (MORE_INSTRUCTIONS if name == "instructions" else 1.0):
                yield f"loop {number}: {name} {old:g} -> {new:g} for {unit}"


def worse(resources: Resources, budget: dict[str, Any]) -> Iterator[str]:
    """Yield what is worse than in the budget."""
    if resources.registers > MORE_REGISTERS * budget["registers"]:
        yield f"registers {budget['registers']} -> {resources.registers}"
    if resources.ctas < budget["ctas"]:
        yield f"CTAs/SM {budget['ctas']} -> {resources.ctas}"
    if resources.shared > budget["shared"]:
        yield f"shared memory {budget['shared']} -> {resources.shared}"
    if budget["async_copies"] and not resources.async_copies:
        yield f"asynchronous copies {budget['async_copies']} -> 0: loads are no longer pipelined"
    before = Resources.of(budget)
    if resources.replication > before.replication:
        yield f"products computed {before.replication} -> {resources.replication} times"
    yield from worse_loops(resources.loops, before.loops)


def entry(row: Row, result: Resources) -> dict[str, Any]:
    """Return the row's entry in the budget file."""
    return result.entry() | {"configuration": row.configuration, "key": row.key}


def recorded(rows: list[Row], budget: dict[str, Any]) -> dict[str, Resources]:
    """Return the recorded resources of the rows with the same fingerprint, whatever their names were then."""
    known = {each["key"]: Resources.of(each) for each in budget.values()}
    return {row.name: known[row.key] for row in rows if row.key in known}


def compare(rows: list[Row], results: dict[str, Resources | str], budget: dict[str, Any]) -> Iterator[str]:
    """Yield what is worse than in the budget, configured otherwise, new, or recorded from other sources."""
    for row in rows:
        result = results[row.name]
        if isinstance(result, str):
            continue
        if row.name not in budget:
            yield f"{row.name}: not in the budget"
            continue
        if (before := budget[row.name]["configuration"]) != row.configuration:
            yield f"{row.name}: was configured as {before}, now as {row.configuration}"
        yield from (f"{row.name}: {text}" for text in worse(result, budget[row.name]))
    if stale := [row.name for row in rows if row.name in budget and row.key != budget[row.name]["key"]]:
        yield f"{len(stale)} rows were recorded from other sources or by another ptxas, such as {stale[0]}"


def read_budget(file: Path) -> dict[str, Any]:
    """Read the budget file, or begin one."""
    return json.loads(file.read_text()) if file.exists() else {"exceptions": [], "triton": {}}


def dump(budget: dict[str, Any]) -> str:
    """Write the budget file: one line an entry, so that a change is readable as a diff."""
    lines = ",\n".join(f"  {json.dumps(exception)}" for exception in budget["exceptions"])
    exceptions = f"[\n{lines}\n ]" if lines else "[]"
    versions = []
    for version, rows in sorted(budget["triton"].items()):
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(rows.items()))
        versions.append(f"  {json.dumps(version)}: {{\n{lines}\n  }}")
    body = ",\n".join(versions)
    return f'{{\n "exceptions": {exceptions},\n "triton": {{\n{body}\n }}\n}}\n'


def judge(
    rows: list[Row], results: dict[str, Resources | str], exceptions: list[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the broken limits that no exception covers, and those that one does, with its reason."""
    broken, exempt = [], []
    for row in rows:
        for limit, text in broken_limits(row.job.arch, results[row.name]):
            covering = [e for e in exceptions if e["limit"] == limit and fnmatch.fnmatchcase(row.name, e["rows"])]
            if covering:
                exempt.append(f"{row.name}: {text} ({covering[0]['reason']})")
            else:
                broken.append(f"{row.name}: {text}")
    return broken, exempt
