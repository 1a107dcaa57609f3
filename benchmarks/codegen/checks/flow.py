"""The flow of control in the text of PTX or SASS: blocks of instructions, what follows what, loops.

Instructions are strings without their semicolon, comments and addresses. A predicated branch may fall through; a
predicated exit goes on. Calls return to where they were made (ptxas puts divisions out of line).
"""

import re
from typing import NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/")
# A label, or an instruction up to its semicolon; directives (.loc, .reg) are none.
_TOKEN = re.compile(r"^[ \t]*([$.\w]+):[ \t]*$|^[ \t{]*((?:@|[A-Za-z])[^;\n]*);", re.MULTILINE)
_BRANCH = re.compile(r"(@\S+ +)?(?:bra(?:\.uni)?|BRA[.\w]*)[ \t]+(.*?)`?\(?([$.\w]+)\)?$")
_END = re.compile(r"(?:ret|exit|trap|EXIT|RET|BRX|JMX|JMP)\b")


class Block(NamedTuple):
    """Instructions that run one after another, and the blocks that may follow, by their number."""

    instructions: list[str]
    successors: list[int]


def blocks(text: str) -> list[Block]:
    """Cut a kernel's text into blocks; the first is where it begins."""
    parts: list[list[str]] = [[]]
    at: dict[str, int] = {}
    for label, instruction in _TOKEN.findall(_COMMENT.sub("", text)):
        ended = bool(parts[-1]) and (_BRANCH.match(parts[-1][-1]) or _END.match(parts[-1][-1]))
        if ended or (label and parts[-1]):
            parts.append([])
        if label:
            at[label] = len(parts) - 1
        else:
            parts[-1].append(" ".join(instruction.split()))
    found = []
    for number, instructions in enumerate(parts):
        last = instructions[-1] if instructions else ""
        branch = _BRANCH.match(last)
        falls = not _END.match(last) if branch is None else bool(branch[1] or branch[2])
        following = [number + 1] if falls and number + 1 < len(parts) else []
        taken = [at[branch[3]]] if branch and at.get(branch[3], len(parts)) < len(parts) else []
        found.append(Block(instructions, [*following, *taken]))
    return found


def _reachable(found: list[Block], without: int) -> set[int]:
    """Return the blocks that the first one leads to, not through block `without`."""
    seen: set[int] = set()
    ahead = [0]
    while ahead:
        if (number := ahead.pop()) not in seen and number != without:
            seen.add(number)
            ahead += found[number].successors
    return seen


def _ends(found: list[Block]) -> dict[int, int]:
    """Return when a depth-first walk from the first block is done with each block that it leads to."""
    ends: dict[int, int] = {}
    seen, path = {0}, [(0, iter(found[0].successors))]
    while path:
        number, ahead = path[-1]
        following = next((each for each in ahead if each not in seen), None)
        if following is None:
            ends[number] = len(ends)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(found[following].successors)))
    return ends


def inner_loops(found: list[Block]) -> list[set[int]]:
    """Return the blocks of each natural loop that has no other within, in the order of the text.

    A loop is what an edge back to its only entry closes (Aho, Sethi, Ullman: Compilers, 1986, 10.4).
    """
    ends = _ends(found)
    before: dict[int, set[int]] = {number: set() for number in ends}
    for number in ends:
        for successor in found[number].successors:
            before[successor].add(number)
    loops: dict[int, set[int]] = {}
    for tail in sorted(ends):
        for head in found[tail].successors:
            # Back in the walk, not in the text: a compiler may write a loop's head behind its end.
            if ends[head] < ends[tail] or (head != tail and tail in _reachable(found, without=head)):
                continue
            body = loops.setdefault(head, {head})
            ahead = [tail]
            while ahead:
                if (number := ahead.pop()) not in body:
                    body.add(number)
                    ahead += before[number]
    return [body for head, body in sorted(loops.items()) if not any(other in body for other in loops if other != head)]
