"""Registers of a wgmma in flight, read from SASS of sm_90: what touches them before the product is waited for.

`HGMMA` runs on beside the threads: until the `WARPGROUP.DEPBAR` that waits for its group, its accumulators and the
registers that hold its first operand belong to it. A group ends with the HGMMA that names `gsb0`;
`WARPGROUP.DEPBAR.LE gsb0, N` waits until at most N groups are in flight. Followed along every path of the program:
which instruction writes such a register, or reads an accumulator, while it is in flight? A further HGMMA may add to
the same accumulators, in order; one that takes accumulators in flight as its operand is a fault.

It sees what ptxas did with registers, not the values: a product that reads shared memory too early is not found here.
"""

import re
from functools import cache

from benchmarks.codegen.checks.flow import Block, blocks

_HGMMA = re.compile(r"\bHGMMA\.64x(\d+)x\d+\.(F16|F32)\S* R(\d+), (?:R(\d+)|gdesc)[^,]*,.*?(gsb0)?$")
_WAIT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)$")
_OPERATION = re.compile(r"^(?:@\S+ )?(\S+) ?(.*)$")
_REGISTER = re.compile(r"(?<![\w])R(\d+)")
_PREDICATE = re.compile(r"^!?U?P(?:\d|T)$")
# What has a register first and does not write it.
_NO_RESULT = re.compile(r"(?:ST|RED|BAR|WARPSYNC|R2UR|RET|CALL|BRX|B?SYNC|BMOV|NANOSLEEP|R2P|UTMA|LDGSTS)")
# What has a predicate first and writes the register after it.
_RESULT_SECOND = re.compile(r"(?:SHFL|ATOM|LDG|VOTE|MATCH)")
_IN_FLIGHT = 8  # groups that are told apart; programs that never wait have their oldest together

Group = frozenset[tuple[int, int]]  # the HGMMA of one group, by block and place
State = tuple[tuple[Group, ...], Group]  # groups in flight, the oldest first, and the one that is not ended


def _span(first: str | None, count: int) -> frozenset[int]:
    return frozenset() if first is None else frozenset(range(int(first), int(first) + count))


@cache
def _of_product(line: str) -> tuple[frozenset[int], frozenset[int], bool] | None:
    """Return an HGMMA's accumulators, the registers of its first operand, and whether it ends a group."""
    if (found := _HGMMA.search(line)) is None:
        return None
    columns, dtype, accumulator, operand, ends = found.groups()
    return _span(accumulator, int(columns) // (2 if dtype == "F32" else 4)), _span(operand, 4), ends is not None


def _width(operation: str) -> int:
    """Return how many registers an instruction writes."""
    parts = operation.split(".")
    if "128" in parts or "F32x4" in parts or operation.startswith(("HMMA", "IMMA")):
        return 2 if operation.startswith("HMMA") and "F32" not in parts else 4
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1] in ("2", "4") else 1
    wide = "64" in parts or "WIDE" in parts or (parts[0] == "CS2R" and "32" not in parts)
    return 2 if wide or parts[0] in ("DADD", "DMUL", "DFMA") or "F64" in parts[1:2] else 1


@cache
def _touched(line: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the registers that an instruction writes, and those that it names besides."""
    found = _OPERATION.match(line)
    if found is None:
        return frozenset(), frozenset()
    operation, operands = found.groups()
    named = [operand.strip() for operand in operands.split(",")]
    if _PREDICATE.match(named[0]) and _RESULT_SECOND.match(operation):
        named = named[1:]
    result = re.match(r"R(\d+)(?:\.|$)", named[0]) if not _NO_RESULT.match(operation) else None
    others = ",".join(named[1:] if result else named)
    return _span(result and result[1], _width(operation)), frozenset(map(int, _REGISTER.findall(others)))


def _products(found: list[Block], group: Group) -> list[tuple[frozenset[int], frozenset[int], bool]]:
    each = [_of_product(found[number].instructions[place]) for number, place in group]
    return [product for product in each if product is not None]


def _fault(found: list[Block], line: str, state: State) -> str:
    """Return what is wrong with an instruction in that state, or nothing."""
    groups, opened = state
    flying = _products(found, frozenset().union(*groups, opened))
    accumulators = frozenset().union(*(product[0] for product in flying))
    operands = frozenset().union(*(product[1] for product in flying))
    if product := _of_product(line):
        wrote, read = product[0] & operands, product[1] & accumulators
    else:
        writes, reads = _touched(line)
        wrote, read = writes & (accumulators | operands), reads & accumulators
    if wrote or read:
        return f"{line}: {'writes' if wrote else 'reads'} R{min(wrote or read)}, which a wgmma in flight has"
    return ""


def touched_in_flight(sass: str) -> list[str]:
    """Return each instruction that touches what a wgmma in flight has, with what it does."""
    if "HGMMA" not in sass:
        return []
    found = blocks(sass)
    faults: dict[tuple[int, int], str] = {}
    seen: set[tuple[int, State]] = set()
    ahead: list[tuple[int, State]] = [(0, ((), frozenset()))]
    while ahead:
        if (at := ahead.pop()) in seen:
            continue
        seen.add(at)
        number, (groups, opened) = at
        for place, line in enumerate(found[number].instructions):
            if (groups or opened) and (fault := _fault(found, line, (groups, opened))):
                faults[number, place] = fault
            if product := _of_product(line):
                opened |= {(number, place)}
                if product[2]:
                    groups, opened = (*groups, opened), frozenset()
                    if len(groups) > _IN_FLIGHT:
                        groups = (groups[0] | groups[1], *groups[2:])
            elif waits := _WAIT.match(line):
                groups = groups[len(groups) - min(int(waits[1], 16), len(groups)) :]
        ahead += [(successor, (groups, opened)) for successor in found[number].successors]
    return [fault for _, fault in sorted(faults.items())]
