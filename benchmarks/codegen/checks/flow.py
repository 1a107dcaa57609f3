"""Control flow in the text of PTX or SASS: blocks of instructions, their successors, loops.

Instructions are strings without semicolon, comments and addresses. A predicated branch may fall through; a predicated
exit goes on. Calls return to the caller (ptxas puts divisions out of line).
"""

import re
from typing import NamedTuple

import networkx as nx  # torch requires it

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


def inner_loops(code: list[Block]) -> list[set[int]]:
    """Return the blocks of each innermost natural loop (Aho, Sethi, Ullman: Compilers, 1986, 10.4), in text order."""
    graph = nx.DiGraph()
    graph.add_node(0)
    graph.add_edges_from((number, each) for number, block in enumerate(code) for each in block.successors)
    dominators = nx.immediate_dominators(graph, 0) | {0: 0}  # of the blocks that are reached

    def dominates(head: int, number: int) -> bool:
        while number not in (head, 0):
            number = dominators[number]
        return number == head

    loops: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        if tail in dominators and dominates(head, tail):
            before = nx.ancestors(nx.restricted_view(graph, [head], []), tail) if tail != head else set()
            loops.setdefault(head, {head, tail}).update({tail, *before} & dominators.keys())
    return [body for head, body in sorted(loops.items()) if not any(other in body for other in loops if other != head)]
