"""Control flow in the text of PTX or SASS: blocks of instructions, their successors, loops.

Instructions are strings without semicolon, comments and addresses. A predicated branch may fall through; a predicated
exit goes on. Calls return to the caller (ptxas puts divisions out of line).
"""

import re
from typing import NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/")
# A label, or an instruction up to its semicolon; directives (.loc, .reg) are none.
_TOKEN = re.compile(r"^[ \t]*([$.\w]+):[ \t]*$|^[ \t{]*((?:@|[A-Za-z])[^;\n]*);", re.MULTILINE)
_BRANCH = re.compile(r"(@\S+ +)?(?:bra(?:\.uni)?|BRA[.\w]*)[ \t]+(.*?)`?\(?([$.\w]+)\)?$")
_END = re.compile(r"(?:ret|exit|trap|EXIT|RET|BRX|JMX|JMP)\b")


class Block(NamedTuple):
    """Instructions that run one after another, and the numbers of the blocks that may follow."""

    instructions: list[str]
    successors: list[int]


def blocks(text: str) -> list[Block]:
    """Split a kernel's text into blocks; the first one is the entry."""
    bodies: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for label, instruction in _TOKEN.findall(_COMMENT.sub("", text)):
        ended = bool(bodies[-1]) and (_BRANCH.match(bodies[-1][-1]) or _END.match(bodies[-1][-1]))
        if ended or (label and bodies[-1]):
            bodies.append([])
        if label:
            labels[label] = len(bodies) - 1
        else:
            bodies[-1].append(" ".join(instruction.split()))
    result = []
    for number, instructions in enumerate(bodies):
        last = instructions[-1] if instructions else ""
        branch = _BRANCH.match(last)
        falls = not _END.match(last) if branch is None else bool(branch[1] or branch[2])
        following = [number + 1] if falls and number + 1 < len(bodies) else []
        target = [labels[branch[3]]] if branch and labels.get(branch[3], len(bodies)) < len(bodies) else []
        result.append(Block(instructions, [*following, *target]))
    return result


def _reachable(code: list[Block], without: int) -> set[int]:
    """Return the blocks that can be reached from the entry, not through block `without`."""
    seen: set[int] = set()
    ahead = [0]
    while ahead:
        if (number := ahead.pop()) not in seen and number != without:
            seen.add(number)
            ahead += code[number].successors
    return seen


def _ends(code: list[Block]) -> dict[int, int]:
    """Return the postorder of a depth-first walk from the entry, by block."""
    ends: dict[int, int] = {}
    seen, path = {0}, [(0, iter(code[0].successors))]
    while path:
        number, ahead = path[-1]
        following = next((each for each in ahead if each not in seen), None)
        if following is None:
            ends[number] = len(ends)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(code[following].successors)))
    return ends


def inner_loops(code: list[Block]) -> list[set[int]]:
    """Return the blocks of each innermost natural loop (Aho, Sethi, Ullman: Compilers, 1986, 10.4), in text order."""
    ends = _ends(code)
    before: dict[int, set[int]] = {number: set() for number in ends}
    for number in ends:
        for successor in code[number].successors:
            before[successor].add(number)
    loops: dict[int, set[int]] = {}
    for tail in sorted(ends):
        for head in code[tail].successors:
            # Back in the walk, not in the text: a compiler may write a loop's head behind its end.
            if ends[head] < ends[tail] or (head != tail and tail in _reachable(code, without=head)):
                continue
            body = loops.setdefault(head, {head})
            ahead = [tail]
            while ahead:
                if (number := ahead.pop()) not in body:
                    body.add(number)
                    ahead += before[number]
    return [body for head, body in sorted(loops.items()) if not any(other in body for other in loops if other != head)]
