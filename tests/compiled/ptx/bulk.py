"""Bulk copies by tensor maps (TMA): boxes of a tensor to and from shared memory, by one thread for all.

A load comes with the phase of its mbarrier (`barriers`). A store has read shared memory when `wait_group.read` says so,
until when nobody may write there, and reaches global memory at `wait_group`, or with the end of the kernel: as late as
the model allows. Both go by the async proxy: what ordinary stores wrote to shared memory needs a fence.proxy.async
before, a tensor map written by the kernel a fence.proxy.tensormap. Traffic of bulk copies is not counted.

A map is 128 bytes in a layout of our own, made by the kernel or by the host (`make_map`); what is not known of it
(im2col, interleaving, strides of elements, NaNs outside, roundings) raises.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tests.compiled.ptx.arithmetic import UINT, i64, u8, u32, u64
from tests.compiled.ptx.shared_memory import AWAITED, BASE, WRITTEN

# Of a map: where each field is, its bits, and the bits of its elements if it has several.
FIELDS = {
    "global_address": (0, 64), "rank": (8, 32), "elemtype": (12, 32), "interleave_layout": (16, 32),
    "swizzle_mode": (20, 32), "fill_mode": (24, 32), "box_dim": (28, 32), "element_stride": (48, 32),
    "global_dim": (68, 32), "global_stride": (88, 64),
}  # fmt: skip
_MAP = 128
_ELEMENT = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # bytes, by elemtype: u8, u16, u32, s32, u64, s64, f16, f32, …
_SWIZZLE = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes of a row that are mixed; 16 mixes nothing


class Map(NamedTuple):
    """A tensor map, dimensions from the innermost on, which is contiguous."""

    address: int
    size: int  # of an element
    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes, of all dimensions
    swizzle: int


def read_map(raw: Any) -> Map:
    """Raises NotImplementedError for what is not known."""

    def field(name: str, count: int = 1) -> list[int]:
        start, width = FIELDS[name]
        return [int(x) for x in raw[start : start + width // 8 * count].copy().view(UINT[width])]

    rank = field("rank")[0] + 1
    if rank > 5 or field("elemtype")[0] >= len(_ELEMENT) or field("swizzle_mode")[0] not in _SWIZZLE:
        raise NotImplementedError("a tensor map that was not filled, or is not known")
    if field("interleave_layout")[0] or field("fill_mode")[0] or set(field("element_stride", rank)) != {1}:
        raise NotImplementedError("a tensor map with interleaving, NaNs outside, or strides of elements")
    size, swizzle = _ELEMENT[field("elemtype")[0]], _SWIZZLE[field("swizzle_mode")[0]]
    box = tuple(field("box_dim", rank))
    if swizzle > 16 and box[0] * size != swizzle:
        raise NotImplementedError(f"rows of {box[0] * size} bytes, swizzled in {swizzle}")
    strides = (size, *field("global_stride", rank - 1))
    return Map(field("global_address")[0], size, box, tuple(field("global_dim", rank)), strides, swizzle)


def make_map(
    address: int, swizzle: int, kind: int, size: int, box: Any, shape: Any, strides: Any, fill: int
) -> Any:  # fmt: skip
    """What the CUDA driver makes for the host, in bytes.

    Args:
        swizzle, kind: as PTX numbers them. size: of an element of that kind.
        box, shape, strides: from the outermost on, strides in elements.
    """
    raw, rank = np.zeros(_MAP, u8), len(box)
    fields = {"global_address": [address], "rank": [rank - 1], "elemtype": [kind], "fill_mode": [fill]}
    fields |= {"swizzle_mode": [swizzle], "box_dim": box[::-1], "element_stride": [1] * rank, "global_dim": shape[::-1]}
    for name, values in (fields | {"global_stride": [x * size for x in strides[::-1][1:]]}).items():
        start, width = FIELDS[name]
        part = np.array([int(x) for x in values], UINT[width]).view(u8)
        raw[start : start + len(part)] = part
    return raw


@dataclass
class Load:
    """A box under way to shared memory."""

    machine: Any
    number: int
    lane: int
    block: int
    chunks: Any  # of 16 bytes, in shared memory
    data: Any
    size: int
    phase: int = 0  # of its mbarrier, when it came
    seen: bool = False

    @property
    def index(self) -> Any:
        return self.chunks[:, None] * 16 + np.arange(16)

    def arrive(self) -> None:
        """From now on warps that have seen it may read; the async proxy wrote it, so there is nothing to fence."""
        shared = self.machine.shared
        if shared.unseen is None:
            shared.unseen = np.zeros(len(shared.bytes), u32)
        shared.unseen[self.index] = (1 << self.machine.threads // 32) - 1
        shared.view("bytes", 128, 8)[self.chunks] = self.data
        shared.mark(self.chunks, 128, WRITTEN)
        if shared.races:  # whoever waited for it is in no race with it
            shared.written[self.index] = shared.read[self.index] = -1


@dataclass
class Store:
    """A box under way to global memory."""

    number: int
    lane: int
    group: int
    chunks: Any
    writes: list[tuple[Any, Any, Any]]  # view, index, values
    reading: bool = True


class Bulk:
    """All that is under way, but for loads, which their mbarriers have."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.stores: list[Store] = []
        self.group = np.zeros(machine.lanes, np.int64)
        self.written: set[tuple[int, int]] = set()  # block and address of tensor maps that were not fenced since

    # ---- tensor maps

    def replace(self, number: int, mask: Any, address: Any, name: str, element: int, value: Any) -> None:
        start, width = FIELDS[name]
        value = value.astype(UINT[width])
        self.machine.shared.store(number, mask, address + start + element * width // 8, width, [value])

    def publish(self, number: int, mask: Any, to: Any, source: Any) -> None:
        """tensormap.cp_fenceproxy: a warp copies a map from shared to global memory."""
        m = self.machine
        m.warps.require_whole(number, mask)
        lane = m.every % 32
        for part in (0, 64):  # each thread two bytes of either half
            place = (lane * 2 + part).astype(i64)
            values = m.shared.load(number, mask, source + place, 16, 1)
            m.memory.store(number, mask, to + place.astype(u64), 16, values)
        for at, block in self._each(mask, to):
            self.written.add((block, at))

    def acquire(self, number: int, mask: Any, address: Any) -> None:
        self.written -= {(block, at) for at, block in self._each(mask, address)}

    def _each(self, mask: Any, address: Any) -> set[tuple[int, int]]:
        lanes, address = self.machine.active(mask, address)
        return set(zip(address.tolist(), self.machine.block_of_lane[lanes].tolist(), strict=True))

    def map_at(self, number: int, lane: int, address: int) -> Map:
        m = self.machine
        one = np.array([lane])
        if (int(m.block_of_lane[lane]), address) in self.written:
            m.refuse([True], "no fence.proxy.tensormap since the tensor map was written", number, one, [address])
        found = m.memory.locate(number, one, np.array([address], u64), _MAP, "tensor map")
        if not found:
            raise NotImplementedError("a tensor map outside all allocations")
        a = found[0][1]
        return read_map(a.bytes[address - a.base :][:_MAP])

    # ---- boxes

    def _issues(
        self, mask: Any, where: Any, address: Any, coordinates: list[Any]
    ) -> Iterator[tuple[int, int, int, list[int]]]:
        """Yield thread, place in shared memory, address of the map and coordinates, of each active thread."""
        m = self.machine
        parts = [m.active(mask, x)[1].tolist() for x in (m.every, where, address)]
        at = np.stack([m.active(mask, x)[1].astype(u32).view(np.int32) for x in coordinates], 1)
        yield from zip(*parts, at.tolist(), strict=True)

    def _chunks(self, number: int, lane: int, where: int, box: Map) -> Any:
        """The box's chunks of 16 bytes in shared memory, swizzled as the hardware does: by the address."""
        m, one = self.machine, np.array([lane])
        size = int(np.prod(box.box)) * box.size
        m.refuse([where % 128 != 0], "misaligned", number, one, [where], "a box in shared memory, 128 bytes")
        m.refuse([box.box[0] * box.size % 16 != 0], "misaligned", number, one, [where], "rows of a box, 16 bytes")
        if where < BASE or where + size > BASE + m.shared.size:
            m.refuse([True], "outside shared memory", number, one, [where], f"a box of {size} bytes")
            where = BASE
        address = where + np.arange(0, size, 16)
        address ^= ((address >> 7) & (box.swizzle // 16 - 1)) << 4
        return (address + m.shared.block_base[lane]) // 16

    def _elements(
        self, number: int, lane: int, box: Map, at: list[int], kind: str
    ) -> tuple[Any, list[tuple[Any, Any, Any]]]:
        """Which elements of a box, flat, are in the tensor; and where these are: (which, view, index)."""
        m, one = self.machine, np.array([lane])
        strides = np.array([box.address, *box.strides[1:]], np.uint64)
        m.refuse(
            [bool((strides % u64(16)).any())], "misaligned", number, one, [box.address], "address and strides, 16 bytes"
        )
        axes = np.meshgrid(*[np.arange(n) + x for n, x in zip(box.box[::-1], at[::-1], strict=True)], indexing="ij")
        axes = [axis.reshape(-1) for axis in axes[::-1]]
        inside = np.logical_and.reduce([(x >= 0) & (x < n) for x, n in zip(axes, box.shape, strict=True)])
        offsets = sum(x * s for x, s in zip(axes, box.strides, strict=True))
        address = (offsets[inside] + box.address).astype(u64)
        lanes = np.full(len(address), lane)
        found = []
        for which, a, index in m.memory.locate(number, lanes, address, box.size, "box") if len(address) else ():
            m.memory.check(number, lanes[which], a, index, box.size * 8, kind)
            found.append((which, a.view("bytes", box.size * 8, 8), index))
        return inside, found

    def load(self, number: int, mask: Any, where: Any, address: Any, coordinates: list[Any], barrier: Any) -> None:
        m = self.machine
        for lane, to, map_address, at in self._issues(mask, where, address, coordinates):
            box = self.map_at(number, lane, map_address)
            chunks = self._chunks(number, lane, to, box)
            inside, found = self._elements(number, lane, box, at, "read")
            elements = np.zeros((len(inside), box.size), u8)
            rows = np.flatnonzero(inside)
            for which, view, index in found:
                elements[rows[which]] = view[index]
            lanes = np.full(len(chunks), lane)
            if m.shared.races:
                m.shared.race(number, lanes, chunks, 16, np.ones(len(chunks), bool))
                m.shared.check_overwrite(number, lanes, chunks, 128)
                m.shared.check_fenced(number, lanes, chunks, 16)
            m.shared.busy(number, lanes, chunks, 128, "shared memory copied to")
            m.shared.mark(chunks, 128, AWAITED)
            data = elements.reshape(-1, 16)
            copy = Load(m, number, lane, int(m.block_of_lane[lane]), chunks, data, data.size)
            for _, place in m.barriers.places(number, m.every == lane, barrier):
                m.barriers.await_copy(number, lane, place, copy)

    def store(self, number: int, mask: Any, where: Any, address: Any, coordinates: list[Any]) -> None:
        m = self.machine
        for lane, source, map_address, at in self._issues(mask, where, address, coordinates):
            box = self.map_at(number, lane, map_address)
            chunks = self._chunks(number, lane, source, box)
            lanes = np.full(len(chunks), lane)
            m.shared.check_read(number, lanes, chunks, 128)
            if m.shared.races:
                m.shared.race(number, lanes, chunks, 16)
                m.shared.check_fenced(number, lanes, chunks, 16)
                m.shared.view("reading", 128, 8)[chunks] += u8(1)
            elements = m.shared.view("bytes", 128, 8)[chunks].reshape(-1, box.size)
            inside, found = self._elements(number, lane, box, at, "write")
            values = elements[inside]
            writes = [(view, index, values[which]) for which, view, index in found]
            self.stores.append(Store(number, lane, int(self.group[lane]), chunks, writes))

    def commit(self, mask: Any) -> None:
        self.group = self.group + self.machine.here(mask)

    def wait(self, mask: Any, allowed: int, read_only: bool) -> None:
        """Let the stores of all groups but the last `allowed` have read shared memory, and reach global memory."""
        m = self.machine
        here = m.here(mask)
        kept = []
        for each in self.stores:
            done = here[each.lane] and each.group < self.group[each.lane] - allowed
            if done and each.reading:
                each.reading = False
                if m.shared.races:
                    m.shared.view("reading", 128, 8)[each.chunks] -= u8(1)
            if done and not read_only:
                self.write(each)
            else:
                kept.append(each)
        self.stores = kept

    def write(self, each: Store) -> None:
        for view, index, values in each.writes:
            view[index] = values

    def end(self) -> None:
        for each in self.stores:
            if each.reading:
                kind = "ends with a bulk store that nobody waited for"
                self.machine.refuse([True], kind, each.number, np.array([each.lane]), [int(each.chunks[0])])
            self.write(each)
