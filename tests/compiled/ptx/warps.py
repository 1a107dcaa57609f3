"""Instructions of whole warps: shuffles, reductions, and matrices with their layouts of elements over threads.

Products of fp16, bf16 and tf32 are exact in fp32; they are added up in fp32, one k after the other, where a tensor core
has its own order and truncates.
"""

from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import bf16_to_f32, f16_to_f32, i64, u16, u32

_LANE = np.arange(32)
ROW, COLUMN = _LANE >> 2, _LANE & 3  # of an accumulator's first element; columns in pairs
_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


class Warps:
    """Of some blocks."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def require_whole(self, number: int, mask: Any, size: int = 32) -> None:
        """All threads of the warps (or groups of four) of which some are there must be there."""
        m = self.machine
        if mask is not None:
            groups = m.of_threads(mask).reshape(-1, size)
            missing = (groups.any(1, keepdims=True) & ~groups).reshape(-1)
            m.refuse(missing, "threads missing", number, m.every, np.zeros(1, i64), "an instruction of whole warps")

    def rows(self, x: Any) -> Any:
        """What each thread has, `[warp, lane]`."""
        return self.machine.of_threads(x).reshape(-1, 32)

    def registers(self, values: list[Any]) -> Any:
        """What each thread has in some registers, `[warp, register, lane]`."""
        return np.stack([self.rows(x) for x in values], 1)

    def shuffle(self, number: int, mask: Any, mode: str, a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        self.require_whole(number, mask)
        a, b, c = self.rows(a), self.rows(b).astype(i64) & 31, self.rows(c).astype(i64)
        clamp, segment = c & 31, (c >> 8) & 31
        low = _LANE & segment
        high = low | (clamp & ~segment)
        source = {"idx": low | (b & ~segment), "bfly": _LANE ^ b}[mode]
        valid = source <= high
        source = np.where(valid, source, _LANE)
        return np.take_along_axis(a, source, 1).reshape(-1), valid.reshape(-1)

    def redux(self, number: int, mask: Any, operation: str, a: Any) -> Any:
        self.require_whole(number, mask)
        a = self.rows(a)
        return np.repeat(_REDUCTIONS[operation].reduce(a, 1, dtype=a.dtype), 32)

    # ---- matrices

    def _row_addresses(self, number: int, mask: Any, address: Any, count: int) -> tuple[Any, Any, Any]:
        """The threads that give the addresses of `count` matrices' rows; which are active, and where they point to."""
        m = self.machine
        lanes = m.every[m.every % 32 < 8 * count]
        given = m.here(mask)[lanes]
        threads = lanes[given]
        index = m.shared.find(number, threads, m.of_threads(address)[threads], 128)
        return given, threads, index

    def ldmatrix(self, number: int, mask: Any, address: Any, count: int, trans: bool) -> list[Any]:
        self.require_whole(number, mask)
        shared = self.machine.shared
        given, threads, index = self._row_addresses(number, mask, address, count)
        shared.check_read(number, threads, index, 128)
        if shared.races:
            shared.race(number, threads, index, 16)
        data = np.zeros((len(given), 8), u16)
        data[given] = shared.view("bytes", 128, 16)[index]
        data = data.reshape(-1, count, 8, 8)  # warp, matrix, row, column
        if trans:
            data = data.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(data).view(u32).reshape(-1, count, 32)  # lane = row * 4 + pair
        return [np.ascontiguousarray(pairs[:, i]).reshape(-1) for i in range(count)]

    def stmatrix(self, number: int, mask: Any, address: Any, values: list[Any], trans: bool) -> None:
        self.require_whole(number, mask)
        given, threads, index = self._row_addresses(number, mask, address, len(values))
        data = np.ascontiguousarray(self.registers(values)).view(u16).reshape(-1, len(values), 8, 8)
        if trans:
            data = data.transpose(0, 1, 3, 2)
        self.machine.shared.put(number, threads, index, 128, np.ascontiguousarray(data).reshape(-1, 8)[given])

    def mma(self, number: int, mask: Any, shape: str, kinds: Any, a: Any, b: Any, c: Any) -> list[Any]:
        """kinds: of D, A, B, C."""
        self.require_whole(number, mask)
        k = int(shape.rpartition("k")[2])
        if not shape.startswith("m16n8") or kinds[1] not in ("f16", "bf16", "tf32") or kinds[3] != "f32":
            raise NotImplementedError(f"mma {shape} {kinds}")
        left, right = fragments(self.registers(a), kinds[1], 16, k), fragments(self.registers(b), kinds[2], 8, k)
        product = np.matmul(left, right.transpose(0, 2, 1)).reshape(-1, 2, 32, 2)  # warp, upper or lower, lane, column
        sums = self.registers(c).view(np.float32)
        return [(product[:, r >> 1, :, r & 1] + sums[:, r]).view(u32).reshape(-1) for r in range(4)]


def numbers(bits: Any, kind: str) -> Any:
    """Elements in fp32; of packed halves `[..., 2]`."""
    if kind == "tf32":
        return (bits & u32(0xFFFFE000)).view(np.float32)
    if bits.dtype == u32:
        bits = np.ascontiguousarray(bits).view(u16).reshape(*bits.shape, 2)
    return bf16_to_f32(bits) if kind == "bf16" else f16_to_f32(bits)


def fragments(registers: Any, kind: str, rows: int, k: int) -> Any:
    """Elements of an operand of a product, `[warp, rows, k]`, of registers `[warp, register, lane]`.

    Of A, with 16 rows, every other register has a row 8 further down than its neighbour.
    """
    values = numbers(registers, kind)
    out = np.empty((len(registers), rows, k), np.float32)
    for r in range(registers.shape[1]):
        row, part = (ROW + 8 * (r & 1), r >> 1) if rows == 16 else (ROW, r)
        if kind == "tf32":
            out[:, row, COLUMN + 4 * part] = values[:, r]
        else:
            for half in range(2):
                out[:, row, 2 * COLUMN + half + 8 * part] = values[:, r, :, half]
    return out
