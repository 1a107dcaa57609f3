"""Matrices of a warp: ldmatrix, stmatrix and mma.sync, with their layouts of elements over threads.

Products of fp16, bf16 and tf32 are exact in fp32; they are added up in fp32, one k after the other, where a tensor core
has its own order and truncates.
"""

from typing import Any

import numpy as np

from tests.compiled.ptx.arithmetic import bf16_to_f32, f16_to_f32, f32_to_f16, u16, u32
from tests.compiled.ptx.warps import by_warp, require_whole

LANE = np.arange(32)
ROW, COLUMN = LANE >> 2, LANE & 3  # of an accumulator's first element; columns in pairs


def ldmatrix(m: Any, number: int, mask: Any, address: Any, count: int, trans: bool) -> list[Any]:
    require_whole(m, number, mask)
    lanes = np.flatnonzero(np.arange(m.lanes) % 32 < 8 * count)
    chosen = np.broadcast_to(address, (m.lanes,))[lanes]
    given = None if mask is None else np.broadcast_to(mask, (m.lanes,))[lanes]
    active, index = m.shared.find(number, given, chosen, 128, lanes)
    threads = lanes if active is None else lanes[active]
    m.shared.check_read(number, threads, index, 128)
    if m.shared.races:
        m.shared.race(number, threads, index, 16)
    m.count("shared", number, threads, index * 16, 16)
    data = np.zeros((len(lanes), 8), u16)
    data[slice(None) if active is None else active] = m.shared.view("bytes", 128, 16)[index]
    data = data.reshape(-1, count, 8, 8)  # warp, matrix, row, column
    if trans:
        data = data.transpose(0, 1, 3, 2)
    pairs = np.ascontiguousarray(data).view(u32).reshape(-1, count, 32)  # lane = row * 4 + pair
    return [np.ascontiguousarray(pairs[:, i]).reshape(-1) for i in range(count)]


def stmatrix(m: Any, number: int, mask: Any, address: Any, values: list[Any], trans: bool) -> None:
    require_whole(m, number, mask)
    count = len(values)
    lanes = np.flatnonzero(np.arange(m.lanes) % 32 < 8 * count)
    chosen = np.broadcast_to(address, (m.lanes,))[lanes]
    given = None if mask is None else np.broadcast_to(mask, (m.lanes,))[lanes]
    active, index = m.shared.find(number, given, chosen, 128, lanes)
    threads = lanes if active is None else lanes[active]
    m.count("shared", number, threads, index * 16, 16)
    data = np.stack([by_warp(m, v) for v in values], 1)
    data = np.ascontiguousarray(data).view(u16).reshape(-1, count, 8, 8)
    if trans:
        data = data.transpose(0, 1, 3, 2)
    rows = np.ascontiguousarray(data).reshape(-1, 8)
    m.shared.put(number, threads, index, 128, rows if active is None else rows[active])


def halves(registers: Any, kind: str) -> Any:
    """[warp, register, lane] of packed halves -> fp32 [warp, register, lane, 2]."""
    parts = np.ascontiguousarray(registers).view(u16).reshape(*registers.shape, 2)
    return bf16_to_f32(parts) if kind == "bf16" else f16_to_f32(parts)


def tf32(registers: Any) -> Any:
    return (registers & u32(0xFFFFE000)).view(np.float32)


def a_matrix(registers: Any, kind: str, k: int) -> Any:
    """Fragments of A, [warp, register, lane], -> [warp, 16, k]."""
    warps = registers.shape[0]
    out = np.empty((warps, 16, k), np.float32)
    if kind == "tf32":
        values = tf32(registers)
        for r in range(registers.shape[1]):
            out[:, ROW + 8 * (r & 1), COLUMN + 4 * (r >> 1)] = values[:, r]
        return out
    values = halves(registers, kind)
    for r in range(registers.shape[1]):
        for half in range(2):
            out[:, ROW + 8 * (r & 1), 2 * COLUMN + half + 8 * (r >> 1)] = values[:, r, :, half]
    return out


def _b_matrix(registers: Any, kind: str, k: int) -> Any:
    warps = registers.shape[0]
    out = np.empty((warps, k, 8), np.float32)
    if kind == "tf32":
        values = tf32(registers)
        for r in range(registers.shape[1]):
            out[:, COLUMN + 4 * r, ROW] = values[:, r]
        return out
    values = halves(registers, kind)
    for r in range(registers.shape[1]):
        for half in range(2):
            out[:, 2 * COLUMN + half + 8 * r, ROW] = values[:, r, :, half]
    return out


def mma(m: Any, number: int, mask: Any, shape: str, kinds: Any, a: Any, b: Any, c: Any) -> list[Any]:
    """kinds: of D, A, B, C."""
    require_whole(m, number, mask)
    k = int(shape.rpartition("k")[2])
    if not shape.startswith("m16n8") or kinds[1] not in ("f16", "bf16", "tf32"):
        raise NotImplementedError(f"mma {shape} {kinds}")
    stacked = [np.stack([by_warp(m, x) for x in v], 1) for v in (a, b)]
    product = np.matmul(a_matrix(stacked[0], kinds[1], k), _b_matrix(stacked[1], kinds[2], k))
    m.counters["tensor multiply-adds"] += m.active_warps(mask) * 16 * 8 * k
    if kinds[3] == "f16":
        parts = np.stack([by_warp(m, x) for x in c], 1)
        sums = halves(parts, "f16")
        out = []
        for r in range(2):
            pair = [f32_to_f16(product[:, ROW + 8 * r, 2 * COLUMN + h] + sums[:, r, :, h]) for h in range(2)]
            out.append(np.stack(pair, -1).view(u32).reshape(-1))
        return out
    out = []
    for r in range(4):
        own = np.ascontiguousarray(product[:, ROW + 8 * (r >> 1), 2 * COLUMN + (r & 1)]).reshape(-1)
        out.append((own + np.broadcast_to(c[r], (m.lanes,)).view(np.float32)).view(u32))
    return out
