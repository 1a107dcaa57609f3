"""Translation of mbarriers, tensor maps, and the copies that go by them."""

from typing import Any

from tests.compiled.ptx.bulk import FIELDS
from tests.compiled.ptx.opcodes_memory import Memory
from tests.compiled.ptx.text import Ins, Mem, PtxError, Tile


class Bulk(Memory):
    """`op_X` writes what the opcode X does."""

    def op_mbarrier(self, i: Ins, *args: Any) -> None:
        kind = i.op[1]
        if "noComplete" in i.op or "shared::cluster" in i.op:
            raise PtxError("only mbarriers of the block itself")
        if kind in ("init", "inval"):
            count = f", {self.bits(args[1], 32)}" if kind == "init" else ""
            return self.emit(f"M.barriers.{kind}({i.number}, {self.mask}, {self.address(args[0], True)}{count})")
        if kind in ("arrive", "expect_tx"):
            *target, place = args[: next(n for n, x in enumerate(args) if isinstance(x, Mem)) + 1]
            if target and target[0] is not None:
                raise PtxError("the state that an arrival returns")
            given = args[len(target) + 1 :]
            promised = self.bits(given[-1], 32) if "expect_tx" in i.op else "0"
            count = "0" if kind == "expect_tx" else "1" if "expect_tx" in i.op or not given else self.bits(given[0], 32)
            place = self.address(place, True)
            return self.emit(f"M.barriers.arrive({i.number}, {self.mask}, {place}, {count}, {promised})")
        if kind in ("try_wait", "test_wait") and "parity" in i.op:
            place = self.address(args[1], True)
            self.emit(f"t = M.barriers.look({i.number}, {self.mask}, {place}, {self.bits(args[2], 32)})")
            return self.write(args[0], "t")
        raise PtxError(f"mbarrier.{kind}")

    def op_tensormap(self, i: Ins, *args: Any) -> None:
        if i.op[1] == "cp_fenceproxy":
            to, source = self.address(args[0], False), self.address(args[1], True)
            return self.emit(f"M.bulk.publish({i.number}, {self.mask}, {to}, {source})")
        name = i.op[3]
        if i.op[1:3] != ("replace", "tile") or name not in FIELDS or "global" in i.op:
            raise PtxError("a tensor map")
        place, *element, value = args
        number = element[0].bits if element else 0
        text = self.bits(value, FIELDS[name][1])
        return self.emit(
            f"M.bulk.replace({i.number}, {self.mask}, {self.address(place, True)}, {name!r}, {number}, {text})"
        )

    def op_fence(self, i: Ins, *args: Any) -> None:
        if "tensormap::generic" in i.op:
            if "acquire" in i.op:
                self.emit(f"M.bulk.acquire({i.number}, {self.mask}, {self.address(args[0], False)})")
            else:
                raise PtxError("the release of a tensor map")
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
        where = f"{self.address(tile.map, False)}, {self.values(tile.at, 32)}"
        if args[0] is tile:  # to global memory
            return self.emit(f"M.bulk.store({i.number}, {self.mask}, {self.address(args[1], True)}, {where})")
        barrier = self.address(args[2], True)
        return self.emit(f"M.bulk.load({i.number}, {self.mask}, {self.address(args[0], True)}, {where}, {barrier})")
