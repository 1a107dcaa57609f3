"""Turn a kernel's basic blocks into Python functions on numpy arrays, one line or a few an instruction, when needed.

A block has two forms. In the full one all live threads take part, and registers are simply assigned; in the masked one
every register keeps the values of the threads that are elsewhere. `m` is the mask for memory in both (None: everybody),
`q` that of an instruction with a predicate. An interpreter of single instructions would look up operands at each step
of each loop; a function of numpy expressions looks them up once.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from tests.compiled.ptx.opcodes_arithmetic import Arithmetic
from tests.compiled.ptx.opcodes_memory import Memory
from tests.compiled.ptx.text import Ins, Kernel, PtxError


class Program(Arithmetic, Memory):
    """A kernel that has been read, and its functions. shared: bytes of a block's dynamic shared memory."""

    def __init__(self, kernel: Kernel, shared: int) -> None:
        super().__init__(kernel)
        self.shared = max(shared, kernel.shared.size)
        self.code: dict[tuple[int, bool], Callable[..., Any]] = {}
        self.instructions: dict[str, list[Ins | None]] = {}  # of each line of a function, by its file's name
        self.ins = [i for block in kernel.blocks for i in block.ins]
        self.uses_wgmma = any(i.op[0] == "wgmma" for i in self.ins)
        self.barrier: dict[int, str] = {}  # before which block which barrier is
        self.ends = [self._end(n) for n in range(len(kernel.blocks))]

    def _end(self, n: int) -> tuple[str, int, bool]:
        """How a block ends: what, where to, and whether it may fall through."""
        if not self.kernel.blocks[n].ins:
            return "next", n + 1, False
        last = self.kernel.blocks[n].ins[-1]
        if last.op[0] == "bra":
            return "bra", self.kernel.labels[last.args[0].name], last.pred is not None
        if last.op[0] in ("ret", "exit"):
            return "ret", -1, last.pred is not None
        if last.is_barrier:
            if last.pred is not None or len(last.args) > 1:
                raise PtxError(f"line {last.line}: {last.text}")
            self.barrier[n + 1] = repr(last.args[0])
            return "bar", n + 1, False
        return "next", n + 1, False

    def block(self, n: int, masked: bool) -> Callable[..., Any]:
        """Return the function of a basic block; it returns the predicate of the jump at its end."""
        if (n, masked) not in self.code:
            self.lines, self.of_line = ["def block(M, R, m):", "    pass"], [None, None]
            for ins in self.kernel.blocks[n].ins:
                self.ins_of_line = ins
                self.instruction(ins, masked)
            name = f"<{self.kernel.name} block {n}{' masked' if masked else ''}>"
            space = dict(self.space)
            exec(compile("\n".join(self.lines), name, "exec"), space)
            self.instructions[name] = self.of_line
            self.code[n, masked] = space["block"]
        return self.code[n, masked]

    def instruction(self, i: Ins, masked: bool) -> None:
        predicate = None if i.pred is None else f"{'~' if i.negated else ''}R[{i.pred.index}]"
        self.mask, self.guard = "m", predicate is not None or masked
        if i.op[0] in ("bra", "ret", "exit"):
            self.emit(f"return {predicate}")
            return
        if predicate is not None:
            self.emit(f"q = {predicate} if m is None else m & {predicate}")
            self.mask = "q"
        elif masked:
            self.emit("q = m")
        method = getattr(self, "op_" + i.op[0], None)
        if method is None:
            raise PtxError(f"line {i.line}: no such instruction here: {i.text}")
        try:
            method(i, *i.args)
        except (PtxError, KeyError, TypeError, ValueError) as error:
            raise PtxError(f"line {i.line}: {i.text}: {error!r}") from error

    def explain(self, error: Exception) -> NoReturn:
        """Raise again, with the instruction whose function failed."""
        trace = error.__traceback__
        while trace is not None:
            of_line = self.instructions.get(trace.tb_frame.f_code.co_filename)
            ins = of_line[trace.tb_lineno - 1] if of_line else None
            if ins is not None:
                used = " (a register that nobody has written?)" if isinstance(error, TypeError | AttributeError) else ""
                raise PtxError(f"{self.kernel.name} line {ins.line}: {ins.text}: {error!r}{used}") from error
            trace = trace.tb_next
        raise error
