"""Turn a basic block of PTX into a Python function on numpy arrays, one line or a few an instruction.

A block has two forms. In the full one all live threads take part, and registers are simply assigned; in the masked one
every register keeps the values of the threads that are elsewhere. `m` is the mask for memory in both (None: everybody),
`q` that of an instruction with a predicate. An interpreter of single instructions would look up operands at each step
of each loop; a function of numpy expressions looks them up once.
"""

from typing import Any

from tests.compiled.ptx.opcodes_arithmetic import Arithmetic
from tests.compiled.ptx.opcodes_bulk import Bulk
from tests.compiled.ptx.opcodes_moves import Moves
from tests.compiled.ptx.text import Ins, PtxError


class Translator(Arithmetic, Moves, Bulk):
    """Of one kernel; `code(block, masked)` gives the function, its name, and the instruction of each of its lines."""

    def code(self, number: int, masked: bool) -> Any:
        block = self.kernel.blocks[number]
        self.lines, self.of_line = ["def block(M, R, m):"], [None]
        for ins in block.ins:
            self.ins = ins
            self.instruction(ins, masked)
        if len(self.lines) == 1:
            self.lines.append("    pass")
        name = f"<{self.kernel.name} block {number}{' masked' if masked else ''}>"
        space = dict(self.space)
        exec(compile("\n".join(self.lines), name, "exec"), space)
        return space["block"], name, list(self.of_line)

    def instruction(self, i: Ins, masked: bool) -> None:
        self.guard = False
        if i.op[0] in ("bra", "ret", "exit"):
            if i.pred is not None:
                self.emit(f"return {'~' if i.negated else ''}R[{i.pred.index}]")
            return
        self.mask = "m"
        if i.pred is not None:
            p = f"{'~' if i.negated else ''}R[{i.pred.index}]"
            self.emit(f"q = {p} if m is None else m & {p}")
            self.mask, self.guard = "q", True
        elif masked:
            self.emit("q = m")
            self.guard = True
        method = getattr(self, "op_" + i.op[0], None)
        if method is None:
            raise PtxError(f"line {i.line}: no such instruction here: {i.text}")
        try:
            method(i, *i.args)
        except (PtxError, KeyError, TypeError, ValueError) as error:
            raise PtxError(f"line {i.line}: {i.text}: {error!r}") from error
