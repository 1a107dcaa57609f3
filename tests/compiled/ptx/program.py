"""Turn a kernel's basic blocks into Python functions on numpy arrays, one line or a few an instruction, when needed.

A block has two forms. In the full one all live threads take part, and registers are simply assigned; in the masked one
every register keeps the values of the threads that are elsewhere. `m` is the mask for memory in both (None: everybody),
`q` that of an instruction with a predicate. An interpreter of single instructions would look up operands at each step
of each loop; a function of numpy expressions looks them up once.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from tests.compiled.ptx.emitter import Emitter, items
from tests.compiled.ptx.opcodes import Arithmetic
from tests.compiled.ptx.text import WIDTHS, Ins, Kernel, Mem, PtxError, Reg, Vec

_MEMORY = {"global": "memory", "shared": "shared"}


class Memory(Emitter):
    """`op_X` writes what the opcode X does with memory, copies, tensor cores, warps and barriers."""

    def address(self, mem: Mem, shared: bool) -> str:
        width = 32 if shared else 64
        if isinstance(mem.base, Reg) and mem.base.width == 64:
            width = 64
        text = self.bits(mem.base, width)
        if mem.offset:
            text = f"{text} + {self.constant(mem.offset, width)}"
        return f"({text}).astype(i64)" if shared else f"({text})"

    @staticmethod
    def space_of(i: Ins) -> str:
        return next((s for s in i.op[1:] if s in ("global", "shared", "param", "local", "const")), "global")

    def values(self, operand: Any, width: int) -> str:
        return "[" + ", ".join(self.bits(x, width) for x in items(operand)) + "]"

    def call(self, i: Ins, method: str, *arguments: Any) -> None:
        """Call a method of a part of the machine with the instruction, its mask and more, for a result `t`."""
        self.emit(f"t = M.{method}({', '.join(map(str, (i.number, self.mask, *arguments)))})")

    def results(self, targets: Any) -> None:
        """Write the parts of `t` to registers of their width."""
        for n, target in enumerate(items(targets)):
            self.write(target, f"t[{n}]")

    def access(self, i: Ins, method: str, mem: Mem, *arguments: Any) -> None:
        """Call a method of the memory that the instruction is for."""
        space = self.space_of(i)
        self.call(i, f"{_MEMORY[space]}.{method}", self.address(mem, space == "shared"), *arguments)

    def op_ld(self, i: Ins, d: Any, mem: Mem, *_: Any) -> None:
        kind, width = i.op[-1], WIDTHS[i.op[-1]]
        if self.space_of(i) == "param":
            text = f"M.params[{self.param[mem.base.name]}]"
            return self.result(d, f"{text}.astype(u{width})" if width > 1 else text, width, kind[0] == "s")
        self.access(i, "load", mem, width, len(items(d)))
        for n, target in enumerate(items(d)):
            self.result(target, f"t[{n}]", width, kind[0] == "s")
        return None

    def op_st(self, i: Ins, mem: Mem, values: Any, *_: Any) -> None:
        width = WIDTHS[i.op[-1]]
        self.access(i, "store", mem, width, self.values(values, width))

    def op_atom(self, i: Ins, d: Any, mem: Mem, values: Any) -> None:
        if self.space_of(i) != "global" or "add" not in i.op or i.op[-1] != "f32":
            raise PtxError("only additions of fp32 to global memory")
        self.access(i, "add", mem, self.values(values, 32))
        self.results(d)

    def op_cp(self, i: Ins, *args: Any) -> None:
        if i.op[1] != "async" or {"mbarrier", "bulk", "L2::cache_hint"} & {*i.op}:
            raise PtxError("only cp.async of threads")
        if "commit_group" in i.op:
            return self.emit(f"M.copies.commit({self.mask})")
        if "wait_group" in i.op:
            return self.emit(f"M.copies.wait({self.mask}, {args[0].bits})")
        to, source, size, *rest = args
        given = self.bits(rest[0], 32) if rest else "None"
        return self.call(i, "copies.issue", self.address(to, True), self.address(source, False), size.bits, given)

    # ---- tensor cores and warps

    def op_ldmatrix(self, i: Ins, d: Any, mem: Mem) -> None:
        self.call(i, "warps.ldmatrix", self.address(mem, True), len(items(d)), "trans" in i.op)
        self.results(d)

    def op_stmatrix(self, i: Ins, mem: Mem, values: Any) -> None:
        self.call(i, "warps.stmatrix", self.address(mem, True), self.values(values, 32), "trans" in i.op)

    def op_mma(self, i: Ins, d: Vec, *factors: Vec) -> None:
        shape = next(x for x in i.op if x.startswith(("m16n8", "m8n8")))
        self.call(i, "warps.mma", repr(shape), i.op[-4:], *(self.values(v, 32) for v in factors))
        self.results(d)

    def op_wgmma(self, i: Ins, *args: Any) -> None:
        if i.op[1] == "fence":
            return self.emit("M.wgmma.fence(R)")
        if i.op[1] == "commit_group":
            return self.emit("M.wgmma.commit()")
        if i.op[1] == "wait_group":
            return self.emit(f"M.wgmma.wait(R, {args[0].bits})")
        shape = next(x for x in i.op if x.startswith("m64"))
        d, a, b, scale, *numbers = args
        in_registers = isinstance(a, Vec)
        return self.call(
            i, "wgmma.issue", "R", repr(shape), i.op[-3:],
            [x.index for x in d.items], [x.index for x in a.items] if in_registers else [],
            self.values(a, 32) if in_registers else self.bits(a, 64),
            self.bits(b, 64), self.bits(scale, 1), [x.bits for x in numbers],
        )  # fmt: skip

    def op_shfl(self, i: Ins, d: Any, *operands: Any) -> None:
        self.call(i, "warps.shuffle", repr(i.op[2]), *(self.bits(x, 32) for x in operands[:3]))
        self.results(d)

    def op_redux(self, i: Ins, d: Any, a: Any, members: Any) -> None:
        self.call(i, "warps.redux", repr(i.op[2]), self.value(a, i.op[-1]))
        self.write(d, self.back("t", i.op[-1]))

    def nothing(self, i: Ins, *args: Any) -> None:
        self.emit("pass")

    op_bar = op_barrier = nothing  # the machine sees the block's end

    def op_fence(self, i: Ins, *args: Any) -> None:
        if i.op[1:3] != ("proxy", "async"):
            raise PtxError("only fences of the async proxy")
        self.emit(f"M.shared.proxy_fence({self.mask})")


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
        if last.op[0] == "ret":
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
        if i.op[0] in ("bra", "ret"):
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
