"""wgmma.mma_async of four warps, as late as the model allows.

Operands are read at the issue; the results come to their registers at the wait, and until then these hold NaNs that
name the wgmma. What a program must not do meanwhile is an error: to write shared memory that is read, to read, write or
copy a register in flight, to change a register that a wgmma takes without a wgmma.fence, or to leave out the
fence.proxy.async after shared memory was written by ordinary stores or cp.async, which the tensor core does not see.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u32, u64
from tests.compiled.ptx.global_memory import ONES
from tests.compiled.ptx.shared_memory import BASE
from tests.compiled.ptx.warps import fragments, numbers

_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # of a descriptor: bytes of a row


class Operand(NamedTuple):
    """A matrix in shared memory: where its elements are, in units of an element, and the bits that they had."""

    index: Any  # [group, rows, k]
    bits: Any


class Pending(NamedTuple):
    """A wgmma that nobody has waited for: what it read, and what it will write."""

    number: int
    operands: list[Operand]
    results: list[tuple[int, Any, Any]]  # register, the mark that it holds, its value
    group: list[int]  # empty until it is committed


@cache
def _offsets(rows: int, k: int, size: int, leading: int, stride: int, swizzle: int, transposed: bool) -> Any:
    """Byte offsets, before swizzling, of the elements [row, k] of an operand in shared memory."""
    r, c = np.arange(rows)[:, None], np.arange(k)[None]
    if not transposed:  # K is contiguous
        byte = c * size
        if swizzle == 0:
            return r // 8 * stride + byte // 16 * leading + r % 8 * 16 + byte % 16
        return r // 8 * stride + r % 8 * swizzle + byte
    chunk, inner = r * size // 16, r * size % 16  # rows are contiguous; 16-bit only
    if swizzle == 0:
        return chunk * stride + c % 8 * 16 + c // 8 * leading + inner
    wide = swizzle // 16
    return chunk % wide * 16 + chunk // wide * leading + c % 8 * swizzle + c // 8 * stride + inner


class Wgmma:
    """All that is under way."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.pending: list[Pending] = []
        self.groups = 0
        self.latest: dict[int, tuple[Any, Any]] = {}  # register -> (mark, value) of those under way
        self.marks = 0
        self.fenced: list[Any] | None = None  # what the registers held at the last wgmma.fence

    def refuse(self, kind: str, number: int, detail: str, lane: int = 0, address: Any = 0) -> None:
        self.machine.refuse(np.ones(1, bool), kind, number, np.array([lane]), np.ravel(address), detail)

    def name(self, register: int) -> str:
        return str(self.machine.program.kernel.names[register])

    def fence(self, R: list[Any]) -> None:
        self.fenced = list(R)

    def check_order(self, R: list[Any], number: int, registers: list[int]) -> None:
        """Registers that a wgmma reads must be as they were at a wgmma.fence, or be written by a wgmma since."""
        if self.fenced is None:
            self.refuse("no wgmma.fence", number, "before a wgmma")
            self.fenced = list(R)
        for r in registers:
            if R[r] is not self.fenced[r] and not (r in self.latest and R[r] is self.latest[r][0]):
                self.refuse("register written since wgmma.fence", number, self.name(r))
                break

    # ---- operands in shared memory

    def address(self, number: int, descriptor: Any, rows: int, k: int, size: int, transposed: bool) -> Any:
        """Return the address of each element, [group, rows, k].

        Raises:
            NotImplementedError: a base offset; groups whose descriptors differ in more than where they begin.
        """
        m = self.machine
        d = m.of_threads(descriptor).reshape(-1, 128)
        if np.any(d != d[:, :1]):
            self.refuse("descriptors differ", number, "in a group of four warps")
        d = d[:, 0].astype(u64)
        if np.any(d >> u64(16) != d[0] >> u64(16)) or int((d[0] >> u64(49)) & u64(7)):
            raise NotImplementedError("descriptors of different layouts, or with a base offset")
        start = (d & u64(0x3FFF)).astype(i64) << 4
        leading, stride = (int((d[0] >> u64(s)) & u64(0x3FFF)) << 4 for s in (16, 32))
        swizzle = _SWIZZLE[int(d[0] >> u64(62))]
        address = start[:, None, None] + _offsets(rows, k, size, leading, stride, swizzle, transposed)
        if swizzle:
            address = address ^ ((address >> 7) & (swizzle // 16 - 1)) << 4
        low, high = address.min(), address.max() + size
        if low < BASE or high > BASE + m.shared.size:
            where = f"wgmma reads {low}..{high}, swizzle {swizzle}, leading {leading}, stride {stride}"
            self.refuse("outside shared memory", number, where, 0, low)
            address = np.clip(address, BASE, BASE + m.shared.size - size)
        return address

    def operand(
        self, number: int, descriptor: Any, rows: int, k: int, kind: str, transposed: bool
    ) -> tuple[Operand, Any]:
        m, shared = self.machine, self.machine.shared
        size = 4 if kind == "tf32" else 2
        address = self.address(number, descriptor, rows, k, size, transposed)
        blocks = m.block_of_lane[::128].astype(i64)
        index = (address + (blocks * shared.stride - BASE)[:, None, None]) // size
        state = shared.view("state", size * 8, size * 8)[:, 0][index]
        whole = ONES[size * 8]
        self.check_elements(state > whole, "shared memory read while a copy to it is under way", number, address)
        self.check_elements(state < whole, "shared memory read before it is written", number, address)
        if shared.races:
            unfenced = shared.generic[index * size] != 0
            self.check_elements(unfenced, "no fence.proxy.async since shared memory was written", number, address)
            for warp in range(4):  # all four read it all: one thread each stands for its warp
                for group in range(len(blocks)):
                    lanes = np.full(index[group].size, group * 128 + warp * 32)
                    shared.race(number, lanes, index[group].reshape(-1), size)
        bits = shared.view("bytes", size * 8, size * 8)[:, 0][index]
        return Operand(index, bits), numbers(bits, kind)

    def check_elements(self, bad: Any, kind: str, number: int, address: Any) -> None:
        if bad.any():
            first = np.argwhere(bad)[0]
            self.refuse(kind, number, f"wgmma, element {first[1:]}", int(first[0]) * 128, address[tuple(first)])

    # ---- the instructions

    def issue(
        self, number: int, mask: Any, R: list[Any], shape: str, kinds: tuple[str, str, str], registers: list[int],
        a_registers: list[int], a: Any, b: Any, scale: Any, signs: list[int],
    ) -> None:  # fmt: skip
        """D = A B + D.

        Args:
            kinds: of D, A, B.
            a: a list of registers' values, or a descriptor.
            signs: of A and B, 1 or -1, and for 16 bits whether each is transposed.
        """
        m = self.machine
        if kinds[0] != "f32":
            raise NotImplementedError(f"wgmma {kinds}")
        m.warps.require_whole(number, mask, 128)
        n, k = (int(x) for x in shape[len("m64n") :].split("k"))
        sign_a, sign_b, *transposes = signs
        groups = m.lanes // 128
        operands = []
        if a_registers:
            left = fragments(m.warps.registers(a), kinds[1], 16, k).reshape(groups, 64, k)
            if any(x is mark for x in a for mark, _ in self.latest.values()):
                self.refuse("register in flight read", number, "A of a wgmma")
            transposes = [0, *transposes]
        else:
            actual, left = self.operand(number, a, 64, k, kinds[1], bool(transposes and transposes[0]))
            operands.append(actual)
        actual, right = self.operand(number, b, n, k, kinds[2], bool(transposes[1:] and transposes[1]))
        operands.append(actual)
        product = np.matmul(left, right.transpose(0, 2, 1)) * np.float32(sign_a * sign_b)
        # Warp, upper or lower 8 rows, row, 8 columns, pair of columns, column -> registers' elements of each thread.
        product = product.reshape(-1, 2, 8, n // 8, 4, 2).transpose(3, 1, 0, 2, 4, 5).reshape(n // 4, -1, 2)
        product = product.transpose(0, 2, 1).reshape(n // 2, -1)
        self.check_order(R, number, [*a_registers, *registers])
        keep = m.of_threads(scale)
        results = []
        for i, register in enumerate(registers):
            before = self.before(R, number, register) if keep.any() else np.zeros(1, u32)
            before = np.ascontiguousarray(m.of_threads(before))
            value = np.where(keep, product[i] + before.view(np.float32), product[i]).view(u32)
            self.marks += 1
            R[register] = mark = np.full(m.lanes, 0x7FC00000 | (self.marks & 0x3FFFFF), u32)
            self.latest[register] = (mark, value)
            results.append((register, mark, value))
        self.count_readers(operands, 1)
        self.pending.append(Pending(number, operands, results, []))

    def before(self, R: list[Any], number: int, register: int) -> Any:
        """What D adds to: of a wgmma under way what it will give."""
        mark, value = self.latest.get(register, (None, None))
        if mark is not None and R[register] is not mark:
            self.refuse("register in flight written", number, self.name(register))
        return value if mark is not None and R[register] is mark else R[register]

    def count_readers(self, operands: list[Operand], change: int) -> None:
        shared = self.machine.shared
        for index, bits in operands if shared.races else ():
            width = bits.itemsize * 8
            shared.view("reading", width, width)[:, 0][index] += ONES[width] * UINT[width](change % 2**width)

    def commit(self) -> None:
        for each in self.pending:
            if not each.group:
                each.group.append(self.groups)
        self.groups += 1

    def wait(self, R: list[Any], allowed: int) -> None:
        """Give the results of all groups but the last `allowed` ones."""
        done, kept = [], []
        for each in self.pending:
            (done if each.group and each.group[0] < self.groups - allowed else kept).append(each)
        self.pending = kept
        values = {}  # by mark
        for each in done:
            self.count_readers(each.operands, -1)
            for operand in each.operands:
                self.check_unchanged(each.number, operand)
            for register, mark, value in each.results:
                values[id(mark)] = each.number, register, value
                if self.latest.get(register, (None, None))[0] is mark:
                    del self.latest[register]
        for i, held in enumerate(R) if values else ():
            if held is not None and id(held) in values:
                number, register, R[i] = values[id(held)]
                if i != register:
                    self.refuse("register in flight copied", number, f"{self.name(register)} to {self.name(i)}")

    def check_unchanged(self, number: int, operand: Operand) -> None:
        shared, width = self.machine.shared, operand.bits.itemsize * 8
        changed = shared.view("bytes", width, width)[:, 0][operand.index] != operand.bits
        what = "shared memory overwritten that a wgmma under way reads"
        self.check_elements(changed, what, number, shared.address(operand.index, operand.bits.itemsize))
