"""What the translation of every instruction is made of: operands as Python expressions, and results as assignments.

A register is a numpy array of unsigned bits, one element a thread, or one for all of them, and never changes in place.
"""

from typing import Any

import numpy as np

from tests.compiled.ptx import arithmetic
from tests.compiled.ptx.text import WIDTHS, Imm, Ins, Kernel, PtxError, Reg, Sym, Vec


def items(operand: Any) -> tuple[Any, ...]:
    """The parts of a vector, or the one operand."""
    return operand.items if isinstance(operand, Vec) else (operand,)


class Emitter:
    """Of one kernel: the lines of the function that is being written, and the constants of all its functions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.constants: list[Any] = []
        self.known: dict[tuple[int, int], int] = {}
        self.space = {name: getattr(arithmetic, name) for name in dir(arithmetic) if not name.startswith("__")}
        self.space |= {"np": np, "K": self.constants}
        self.param = {name: i for i, (_, name) in enumerate(kernel.params)}
        self.lines: list[str] = []
        self.of_line: list[Ins | None] = []
        self.ins_of_line: Ins | None = None
        self.guard = False  # whether results are merged under `q`
        self.mask = "m"  # of memory

    def constant(self, bits: int, width: int) -> str:
        key = (bits & ((1 << width) - 1), width)
        if key not in self.known:
            self.known[key] = len(self.constants)
            value = np.array([bool(bits)]) if width == 1 else arithmetic.const(bits, width)
            value.flags.writeable = False
            self.constants.append(value)
        return f"K[{self.known[key]}]"

    def bits(self, arg: Any, width: int) -> str:
        """The operand as unsigned bits of that width."""
        if isinstance(arg, Imm):
            return self.constant(arg.bits, width)
        if isinstance(arg, Reg):
            if arg.width == width:
                return f"R[{arg.index}]"
            return f"R[{arg.index}].astype(u{width})"
        if isinstance(arg, Sym):
            if arg.name.startswith("%"):
                return f"M.special({arg.name!r}, {width})"
            if arg.name in self.param:
                return f"M.params[{self.param[arg.name]}]"
            return f"M.variable({arg.name!r}, {width})"
        raise PtxError(f"operand {arg}")

    def value(self, arg: Any, kind: str) -> str:
        """The operand as numbers of that type."""
        width = WIDTHS[kind]
        text = self.bits(arg, width)
        if kind[0] == "s":
            return f"{text}.view(i{width})"
        if kind in ("f32", "f64"):
            return f"{text}.view({kind})"
        return text

    def back(self, text: str, kind: str) -> str:
        if kind[0] == "s" or kind in ("f32", "f64"):
            return f"({text}).view(u{WIDTHS[kind]})"
        return text

    def write(self, reg: Any, text: str) -> None:
        if reg is None:
            return
        if self.guard:
            self.emit(f"R[{reg.index}] = merge(q, {text}, R[{reg.index}])")
        else:
            self.emit(f"R[{reg.index}] = {text}")

    def emit(self, text: str) -> None:
        self.lines.append("    " + text)
        self.of_line.append(self.ins_of_line)

    def result(self, reg: Reg, text: str, width: int, signed: bool = False) -> None:
        """Write bits of `width` to a register that may be wider."""
        if reg is None:
            return
        if reg.width == width:
            self.write(reg, text)
        elif signed:
            self.write(reg, f"({text}).view(i{width}).astype(i{reg.width}).view(u{reg.width})")
        else:
            self.write(reg, f"({text}).astype(u{reg.width})")
