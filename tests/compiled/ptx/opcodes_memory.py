"""Translation of what a thread does beyond its registers: memory, copies, tensor cores, warps, barriers."""

from typing import Any

from tests.compiled.ptx.atomics import OPERATIONS
from tests.compiled.ptx.emitter import Emitter
from tests.compiled.ptx.text import WIDTHS, Ins, Mem, PtxError, Reg, Vec

_MEMORY = {"global": "M.memory", "shared": "M.shared", "local": "M.local"}
_SPACES = {*_MEMORY, "param", "const"}


class Memory(Emitter):
    """`op_X` writes what the opcode X does."""

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
        return next((s.split("::")[0] for s in i.op[1:] if s.split("::")[0] in _SPACES), "global")

    def access(self, i: Ins, mem: Mem) -> tuple[str, str]:
        """Return the memory, and what all its accesses begin with: instruction, mask, address."""
        space = self.space_of(i)
        return _MEMORY[space], f"{i.number}, {self.mask}, {self.address(mem, space == 'shared')}"

    def values(self, operand: Any, width: int) -> str:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        return "[" + ", ".join(self.bits(x, width) for x in items) + "]"

    def op_ld(self, i: Ins, d: Any, mem: Mem, *_: Any) -> None:
        kind, width = i.op[-1], WIDTHS[i.op[-1]]
        targets = d.items if isinstance(d, Vec) else (d,)
        if self.space_of(i) == "param":
            self.emit(f"t = M.params[{self.param[mem.base.name]}]")
            self.result(targets[0], f"t.astype(u{width})" if width > 1 else "t", width, kind[0] == "s")
            return
        memory, access = self.access(i, mem)
        self.emit(f"t = {memory}.load({access}, {width}, {len(targets)})")
        for n, target in enumerate(targets):
            self.result(target, f"t[{n}]", width, kind[0] == "s")

    def op_st(self, i: Ins, mem: Mem, values: Any, *_: Any) -> None:
        width = WIDTHS[i.op[-1]]
        memory, access = self.access(i, mem)
        self.emit(f"{memory}.store({access}, {width}, {self.values(values, width)})")

    def op_atom(self, i: Ins, d: Any, mem: Mem, *operands: Any) -> None:
        kind, width = i.op[-1], WIDTHS[i.op[-1]]
        operation = next(x for x in i.op[1:] if x in OPERATIONS)
        memory, access = self.access(i, mem)
        texts = ", ".join(self.values(x, width) for x in operands)
        self.emit(f"t = {memory}.atomic({access}, {kind!r}, {operation!r}, {texts})")
        for n, target in enumerate(d.items if isinstance(d, Vec) else (d,)):
            self.result(target, f"t[{n}]", width)

    def op_red(self, i: Ins, mem: Mem, *values: Any) -> None:
        count = len(values[0].items) if isinstance(values[0], Vec) else 1
        self.op_atom(i, Vec((None,) * count), mem, *values)

    def op_cp(self, i: Ins, *args: Any) -> None:
        if "bulk" in i.op:
            return self.bulk_copy(i, *args)
        if i.op[1] != "async" or "mbarrier" in i.op:
            raise PtxError("only cp.async of threads, and bulk copies")
        if "commit_group" in i.op:
            return self.emit(f"M.copies.commit({self.mask})")
        if "wait_group" in i.op:
            return self.emit(f"M.copies.wait({self.mask}, {args[0].bits})")
        if "wait_all" in i.op:
            return self.emit(f"M.copies.wait({self.mask}, -1)")
        to, source, size, *rest = args
        given = self.bits(rest[0], 32) if rest and not ("L2::cache_hint" in i.op and len(rest) == 1) else "None"
        to, source = self.address(to, True), self.address(source, False)
        return self.emit(f"M.copies.issue({i.number}, {self.mask}, {to}, {source}, {size.bits}, {given})")

    def bulk_copy(self, i: Ins, *args: Any) -> None:
        raise NotImplementedError

    def op_ldmatrix(self, i: Ins, d: Any, mem: Mem) -> None:
        targets = d.items if isinstance(d, Vec) else (d,)
        access = f"{i.number}, {self.mask}, {self.address(mem, True)}"
        self.emit(f"t = matrices.ldmatrix(M, {access}, {len(targets)}, {'trans' in i.op})")
        for n, target in enumerate(targets):
            self.write(target, f"t[{n}]")

    def op_stmatrix(self, i: Ins, mem: Mem, values: Any) -> None:
        access = f"{i.number}, {self.mask}, {self.address(mem, True)}"
        self.emit(f"matrices.stmatrix(M, {access}, {self.values(values, 32)}, {'trans' in i.op})")

    def op_mma(self, i: Ins, d: Vec, a: Vec, b: Vec, c: Vec) -> None:
        shape = next(x for x in i.op if x.startswith("m16n8") or x.startswith("m8n8"))
        kinds = i.op[-4:]
        parts = ", ".join(self.values(v, 32) for v in (a, b, c))
        self.emit(f"t = matrices.mma(M, {i.number}, {self.mask}, {shape!r}, {kinds!r}, {parts})")
        for n, target in enumerate(d.items):
            self.write(target, f"t[{n}]")

    def op_wgmma(self, i: Ins, *args: Any) -> None:
        if i.op[1] == "fence":
            return self.emit(f"M.wgmma.fence(R, {self.mask})")
        if i.op[1] == "commit_group":
            return self.emit(f"M.wgmma.commit({self.mask})")
        if i.op[1] == "wait_group":
            return self.emit(f"M.wgmma.wait(R, {self.mask}, {args[0].bits})")
        shape = next(x for x in i.op if x.startswith("m64"))
        d, a, b, scale, *rest = args
        numbers = [x.bits for x in rest]
        a_text = self.values(a, 32) if isinstance(a, Vec) else self.bits(a, 64)
        registers = [x.index for x in d.items]
        a_registers = [x.index for x in a.items] if isinstance(a, Vec) else []
        return self.emit(
            f"M.wgmma.issue(R, {i.number}, {self.mask}, {shape!r}, {i.op[-3:]!r}, {registers}, {a_registers}, "
            f"{a_text}, {self.bits(b, 64)}, {self.bits(scale, 1)}, {numbers})"
        )

    def op_shfl(self, i: Ins, d: Any, a: Any, b: Any, c: Any, members: Any) -> None:
        d, p = d.items if isinstance(d, Vec) else (d, None)
        values = ", ".join(self.bits(x, 32) for x in (a, b, c))
        self.emit(f"t = warps.shuffle(M, {i.number}, {self.mask}, {i.op[2]!r}, {values})")
        self.write(d, "t[0]")
        if p is not None:
            self.write(p, "t[1]")

    def op_vote(self, i: Ins, d: Any, a: Any, members: Any) -> None:
        mode = i.op[2]
        self.emit(f"t = warps.ballot(M, {i.number}, {self.mask}, {self.bits(a, 1)})")
        if mode == "ballot":
            return self.write(d, "t[0]")
        return self.write(d, {"any": "t[0] != 0", "all": "t[0] == t[1]", "uni": "(t[0] == 0) | (t[0] == t[1])"}[mode])

    def op_activemask(self, i: Ins, d: Any) -> None:
        self.emit(f"t = warps.ballot(M, {i.number}, {self.mask}, {self.constant(1, 1)})")
        self.write(d, "t[1]")

    def op_redux(self, i: Ins, d: Any, a: Any, members: Any) -> None:
        self.emit(f"t = warps.redux(M, {i.number}, {self.mask}, {i.op[2]!r}, {self.value(a, i.op[-1])})")
        self.write(d, self.back("t", i.op[-1]))

    def op_elect(self, i: Ins, d: Any, members: Any) -> None:
        d, p = d.items
        self.emit(f"t = warps.elect(M, {i.number}, {self.mask})")
        self.write(d, "t[0]")
        self.write(p, "t[1]")

    def op_bar(self, i: Ins, *args: Any) -> None:
        pass  # the machine sees the block's end

    op_barrier = op_bar

    def nothing(self, i: Ins, *args: Any) -> None:
        self.emit("pass")

    op_membar = op_nanosleep = op_prefetch = op_setmaxnreg = op_griddepcontrol = nothing

    def op_trap(self, i: Ins) -> None:
        self.emit(f"M.trap({i.number}, {self.mask})")
