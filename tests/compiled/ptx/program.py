"""A kernel that has been read, with the functions of its basic blocks, which are made when they are first needed."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from tests.compiled.ptx.counters import class_of
from tests.compiled.ptx.text import Ins, Kernel, PtxError
from tests.compiled.ptx.translate import Translator


class Program:
    """shared: bytes of a block's dynamic shared memory."""

    def __init__(self, kernel: Kernel, shared: int) -> None:
        self.kernel, self.shared = kernel, max(shared, kernel.shared.size)
        self.translator = Translator(kernel)
        self.code: dict[tuple[int, bool], Callable[..., Any]] = {}
        self.lines: dict[str, list[Ins | None]] = {}  # of each function, by its file's name
        self.ins = [i for block in kernel.blocks for i in block.ins]
        self.classes = [Counter(class_of(i) for i in block.ins) for block in kernel.blocks]
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
        found = self.code.get((n, masked))
        if found is None:
            found, name, self.lines[name] = self.translator.code(n, masked)
            self.code[n, masked] = found
        return found

    def explain(self, error: Exception) -> NoReturn:
        """Raise again, with the instruction whose function failed."""
        trace = error.__traceback__
        while trace is not None:
            of_line = self.lines.get(trace.tb_frame.f_code.co_filename)
            ins = of_line[trace.tb_lineno - 1] if of_line else None
            if ins is not None:
                used = " (a register that nobody has written?)" if isinstance(error, TypeError | AttributeError) else ""
                raise PtxError(f"{self.kernel.name} line {ins.line}: {ins.text}: {error!r}{used}") from error
            trace = trace.tb_next
        raise error
