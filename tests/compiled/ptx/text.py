"""Read PTX text: one kernel of a module, its parameters, registers and instructions, cut into basic blocks.

Read is what Triton and LLVM write, not all of the language: a statement that is not known raises, with its line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WIDTHS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16} | {
    f"{letter}{width}": width for letter in "busf" for width in (8, 16, 32, 64) if (letter, width) != ("f", 8)
}


class Reg(NamedTuple):
    index: int
    width: int


class Imm(NamedTuple):
    bits: int


class Vec(NamedTuple):
    items: tuple[Any, ...]  # of operands; None is the sink `_`


class Mem(NamedTuple):
    base: Any  # Reg, Sym or Imm
    offset: int


class Sym(NamedTuple):
    name: str  # a label, a variable or a special register


@dataclass
class Ins:
    number: int
    line: int  # of the PTX text
    text: str
    op: tuple[str, ...]  # the opcode, split at the dots
    args: list[Any]
    pred: Reg | None = None
    negated: bool = False
    source: str = ""  # file and line of the kernel's source

    @property
    def is_barrier(self) -> bool:
        return self.op[0] in ("bar", "barrier") and "warp" not in self.op


@dataclass
class Block:
    start: int
    ins: list[Ins] = field(default_factory=list)


@dataclass
class Variables:
    """Static variables of shared memory: their offsets, and how many bytes there are."""

    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, alignment: int, size: int) -> None:
        self.offsets[name] = -(-self.size // alignment) * alignment
        self.size = self.offsets[name] + size


@dataclass
class Kernel:
    name: str
    params: list[tuple[str, str]]  # type, name
    widths: list[int]  # of registers
    names: list[str]
    blocks: list[Block]
    labels: dict[str, int]  # block numbers
    threads: int
    shared: Variables


class PtxError(Exception):
    """The text cannot be read, or needs what is not there."""


_LABEL = re.compile(r"([$A-Za-z_][\w$.]*):")
_NUMBER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)U?$")
_VARIABLE = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_TERMINATORS = {"bra", "ret"}


def _statements(body: str, first_line: int) -> Iterator[tuple[int, str, str]]:
    """Yield (line, text, source) of statements, labels and scope braces."""
    text, start, source = "", 0, ""
    for number, raw in enumerate(body.split("\n"), first_line):
        line, _, comment = raw.partition("//")
        if line.split()[:1] == [".loc"]:
            source = comment.strip()  # LLVM writes file:line:column there
            continue
        for part in re.findall("[{};]|[^{};]+", line):
            if not text.strip():
                text, start = "", number
            if part in ("{", "}") and not text:
                yield number, part, source
            elif part == ";":
                yield start, " ".join(text.split()), source
                text = ""
            else:
                text += part
        if _LABEL.fullmatch(text.strip()):  # a label has its line to itself
            yield start, text.strip(), source
            text = ""
        text += " "


def _operands(text: str) -> list[str]:
    """Cut at the commas outside of braces."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [*parts, part.strip()] if part.strip() else parts


class _Reader:
    """Of one entry, statement by statement. Names of registers and labels end with the braces around them."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.names: list[str] = []
        self.scopes: list[dict[str, Reg | Sym]] = [{}]
        self.opened = 0
        self.ins: list[Ins] = []
        self.labels: dict[str, int] = {}

    def statement(self, line: int, text: str, source: str) -> None:
        if text == "{":
            self.opened += 1
            self.scopes.append({})
        elif text == "}":
            self.scopes.pop()
        elif _LABEL.fullmatch(text):
            label = text[:-1]
            if len(self.scopes) > 1:
                self.scopes[-1][label] = Sym(f"{label}@{self.opened}")
                label = f"{label}@{self.opened}"
            self.labels[label] = len(self.ins)
        elif text.startswith(".reg"):
            self.declare(text)
        elif text.startswith("."):
            if not text.startswith(".pragma"):
                raise PtxError(f"line {line}: {text}")
        elif text:
            self.instruction(line, text, source)

    def instruction(self, line: int, text: str, source: str) -> None:
        pred, negated, rest = None, False, text
        if text.startswith("@"):
            guard, rest = text[1:].split(None, 1)
            negated = guard.startswith("!")
            pred = self.find(guard.lstrip("!"))
        opcode, _, operands = rest.partition(" ")
        args = [self.operand(x) for x in _operands(operands)]
        self.ins.append(Ins(len(self.ins), line, text, tuple(opcode.split(".")), args, pred, negated, source))

    def declare(self, statement: str) -> None:
        _, kind, *names = statement.replace(",", " ").split()
        for name in names:
            if match := re.fullmatch(r"(.+)<(\d+)>", name):
                for i in range(int(match[2])):
                    self.register(f"{match[1]}{i}", WIDTHS[kind[1:]])
            else:
                self.register(name, WIDTHS[kind[1:]])

    def register(self, name: str, width: int) -> None:
        self.scopes[-1][name] = Reg(len(self.widths), width)
        self.widths.append(width)
        self.names.append(name)

    def find(self, name: str) -> Any:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def operand(self, text: str) -> Any:
        if text == "_":
            return None
        if text.startswith("{"):
            return Vec(tuple(self.operand(x) for x in _operands(text[1:-1])))
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            if not offset and (match := re.fullmatch(r"(.+?)(-\d+)", base)):
                base, offset = match[1], match[2]
            return Mem(self.operand(base), int(offset, 0) if offset else 0)
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return Imm(int(match[1], 16))
        if _NUMBER.fullmatch(text):
            return Imm(int(text.rstrip("U"), 0))
        if "|" in text:
            return Vec(tuple(self.operand(x) for x in text.split("|")))
        return self.find(text) or Sym(text)


def _closing(text: str, opening: int) -> int:
    """Where the brace at `opening` is closed; those in comments do not count."""
    depth = 0
    plain = re.sub(r"//[^\n]*", lambda match: " " * len(match[0]), text)
    for at in range(opening, len(plain)):
        depth += (plain[at] == "{") - (plain[at] == "}")
        if depth == 0:
            return at
    raise PtxError("an entry that does not end")


def _parameter(words: list[str]) -> tuple[str, str]:
    """Type and name."""
    return words[1][1:], words[-1]


def read(text: str, name: str | None = None) -> Kernel:
    """Read the entry of that name, or the first one."""
    entry = re.search(r"\.entry\s+" + (re.escape(name) if name else r"([\w$]+)") + r"\s*\(", text)
    if entry is None:
        raise PtxError(f"no entry {name}")
    close = text.index(")", entry.end())
    opening = text.index("{", close)
    params = [_parameter(words.split()) for words in text[entry.end() : close].split(",") if words.strip()]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", text[close + 1 : opening])
    shared = Variables()
    for alignment, variable, size in _VARIABLE.findall(text):
        shared.add(variable, int(alignment), int(size))
    reader = _Reader()
    for line, statement, source in _statements(
        text[opening + 1 : _closing(text, opening)], text.count("\n", 0, opening) + 1
    ):
        reader.statement(line, statement, source)
    blocks, labels = _cut(reader.ins, reader.labels)
    per_block = int(threads[1]) if threads else 32
    return Kernel(name or entry[1], params, reader.widths, reader.names, blocks, labels, per_block, shared)


def _cut(ins: list[Ins], labels: dict[str, int]) -> tuple[list[Block], dict[str, int]]:
    """Cut at what is jumped to, and after jumps and barriers; labels become numbers of blocks."""
    targets = {i.args[0].name for i in ins if i.op[0] == "bra"}
    labels = {label: at for label, at in labels.items() if label in targets}
    starts = {0, *labels.values()}
    starts |= {i.number + 1 for i in ins if i.op[0] in _TERMINATORS or i.is_barrier}
    ordered = sorted(s for s in starts if s <= len(ins))
    blocks = [Block(s, ins[s:stop]) for s, stop in zip(ordered, [*ordered[1:], len(ins)], strict=True)]
    number = {s: i for i, s in enumerate(ordered)}
    return blocks, {label: number[at] for label, at in labels.items()}
