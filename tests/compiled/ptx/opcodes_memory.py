"""Translation of what a thread does beyond its registers: memory, copies, tensor cores, warps, barriers, TMA."""

from functools import partialmethod
from typing import Any

from tests.compiled.ptx.bulk import FIELDS
from tests.compiled.ptx.emitter import Emitter, items
from tests.compiled.ptx.global_memory import OPERATIONS
from tests.compiled.ptx.text import WIDTHS, Ins, Mem, PtxError, Reg, Tile, Vec

_MEMORY = {"global": "memory", "shared": "shared", "local": "local"}
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

    def op_atom(self, i: Ins, d: Any, mem: Mem, *operands: Any) -> None:
        kind, width = i.op[-1], WIDTHS[i.op[-1]]
        operation = next(x for x in i.op[1:] if x in OPERATIONS)
        self.access(i, "atomic", mem, repr(kind), repr(operation), *(self.values(x, width) for x in operands))
        for n, target in enumerate(items(d)):
            self.result(target, f"t[{n}]", width)

    def op_red(self, i: Ins, mem: Mem, *values: Any) -> None:
        self.op_atom(i, Vec((None,) * len(items(values[0]))), mem, *values)

    def op_cp(self, i: Ins, *args: Any) -> None:
        if "bulk" in i.op:
            return self.bulk_copy(i, *args)
        if i.op[1] != "async" or "mbarrier" in i.op:
            raise PtxError("only cp.async of threads, and bulk copies")
        if "commit_group" in i.op:
            return self.emit(f"M.copies.commit({self.mask})")
        if "wait_group" in i.op or "wait_all" in i.op:
            return self.emit(f"M.copies.wait({self.mask}, {args[0].bits if args else -1})")
        to, source, size, *rest = args
        given = self.bits(rest[0], 32) if rest and not ("L2::cache_hint" in i.op and len(rest) == 1) else "None"
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

    def op_vote(self, i: Ins, d: Any, a: Any, members: Any) -> None:
        self.call(i, "warps.ballot", self.bits(a, 1))
        texts = {"ballot": "t[0]", "any": "t[0] != 0", "all": "t[0] == t[1]", "uni": "(t[0] == 0) | (t[0] == t[1])"}
        self.write(d, texts[i.op[2]])

    def op_activemask(self, i: Ins, d: Any) -> None:
        self.call(i, "warps.ballot", self.constant(1, 1))
        self.write(d, "t[1]")

    def op_redux(self, i: Ins, d: Any, a: Any, members: Any) -> None:
        self.call(i, "warps.redux", repr(i.op[2]), self.value(a, i.op[-1]))
        self.write(d, self.back("t", i.op[-1]))

    def op_elect(self, i: Ins, d: Any, members: Any) -> None:
        self.call(i, "warps.elect")
        self.results(d)

    def nothing(self, i: Ins, *args: Any) -> None:
        self.emit("pass")

    op_bar = op_barrier = nothing  # the machine sees the block's end
    op_membar = op_nanosleep = op_prefetch = op_setmaxnreg = op_griddepcontrol = nothing
    op_trap = partialmethod(call, method="trap")

    # ---- mbarriers, tensor maps, and the copies that go by them

    def op_mbarrier(self, i: Ins, *args: Any) -> None:
        kind = i.op[1]
        if "noComplete" in i.op or "shared::cluster" in i.op:
            raise PtxError("only mbarriers of the block itself")
        if kind in ("init", "inval"):
            count = [self.bits(x, 32) for x in args[1:]]
            return self.call(i, f"barriers.{kind}", self.address(args[0], True), *count)
        if kind in ("arrive", "expect_tx"):
            *target, place = args[: next(n for n, x in enumerate(args) if isinstance(x, Mem)) + 1]
            if target and target[0] is not None:
                raise PtxError("the state that an arrival returns")
            given = args[len(target) + 1 :]
            promised = self.bits(given[-1], 32) if "expect_tx" in i.op else "0"
            count = "0" if kind == "expect_tx" else "1" if "expect_tx" in i.op or not given else self.bits(given[0], 32)
            return self.call(i, "barriers.arrive", self.address(place, True), count, promised)
        if kind in ("try_wait", "test_wait") and "parity" in i.op:
            self.call(i, "barriers.look", self.address(args[1], True), self.bits(args[2], 32))
            return self.write(args[0], "t")
        raise PtxError(f"mbarrier.{kind}")

    def op_tensormap(self, i: Ins, *args: Any) -> None:
        if i.op[1] == "cp_fenceproxy":
            return self.call(i, "bulk.publish", self.address(args[0], False), self.address(args[1], True))
        name = i.op[3]
        if i.op[1:3] != ("replace", "tile") or name not in FIELDS or "global" in i.op:
            raise PtxError("a tensor map")
        place, *element, value = args
        number = element[0].bits if element else 0
        text = self.bits(value, FIELDS[name][1])
        return self.call(i, "bulk.replace", self.address(place, True), repr(name), number, text)

    def op_fence(self, i: Ins, *args: Any) -> None:
        if "tensormap::generic" in i.op:
            if "acquire" not in i.op:
                raise PtxError("the release of a tensor map")
            self.call(i, "bulk.acquire", self.address(args[0], False))
        elif "proxy" in i.op or "mbarrier_init" in i.op:
            self.emit(f"M.shared.proxy_fence({self.mask})")
        else:
            self.emit("pass")

    def bulk_copy(self, i: Ins, *args: Any) -> None:
        if "commit_group" in i.op:
            return self.emit(f"M.bulk.commit({self.mask})")
        if "wait_group" in i.op:
            return self.emit(f"M.bulk.wait({self.mask}, {args[0].bits}, {'read' in i.op})")
        tiles = [x for x in args if isinstance(x, Tile)]
        if "tensor" not in i.op or i.op[1] != "async" or not tiles or {"im2col", "multicast::cluster"} & {*i.op}:
            raise PtxError("only boxes of tensor maps")
        tile = tiles[0]
        where = [self.address(tile.map, False), self.values(tile.at, 32)]
        if args[0] is tile:  # to global memory
            return self.call(i, "bulk.store", self.address(args[1], True), *where)
        return self.call(i, "bulk.load", self.address(args[0], True), *where, self.address(args[2], True))
