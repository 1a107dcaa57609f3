"""Boxes of a tensor map to and from shared memory, behind mbarriers: each wrong program beside a right one."""

import numpy as np
import pytest

from tests.compiled.hand_written import aligned, refused, run
from tests.compiled.ptx.text import PtxError

ROWS, COLUMNS = 40, 48  # of the matrix, of 4 bytes
BYTES = 1024  # of a box
MODE = {0: 0, 32: 1, 64: 2, 128: 3}
# Shared memory: the map, the mbarrier at 128, the box at 1024. %p1: the first warp, %p2: the first thread.
BEGIN = """mov.b32 %r6, global_smem;
add.s32 %r8, %r6, 128;
add.s32 %r9, %r6, 1024;
cvt.u64.u32 %rd20, %r6;
shl.b32 %r5, %r0, 2;
add.s32 %r7, %r6, %r5;
add.s32 %r10, %r9, %r5;
mul.wide.u32 %rd21, %r0, 4;
add.s64 %rd22, %rd1, %rd21;
setp.lt.u32 %p1, %r0, 32;
setp.eq.u32 %p2, %r0, 0;
"""
REPLACE = "tensormap.replace.tile.{}.shared::cta.b1024.b{} [%rd20], {};\n"
RELEASE = "tensormap::generic.release.gpu.sync.aligned"
PUBLISH = f"""@%p1 tensormap.cp_fenceproxy.global.shared::cta.{RELEASE} [%rd2], [%rd20], 128;
@%p1 fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
bar.sync 0;
"""
INIT = "@%p2 mbarrier.init.shared::cta.b64 [%r8], 1;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
EXPECT = f"@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], {BYTES};\n"
LOAD = "@%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r9], [%rd2, {X, Y}], [%r8];\n"
WAIT = """{
.reg .pred done;
look:
mbarrier.try_wait.parity.shared::cta.b64 done, [%r8], 0;
@!done bra.uni look;
}
"""
OUT = "".join(f"ld.shared.b32 %r20, [%r10+{n}];\nst.global.b32 [%rd22+{n}], %r20;\n" for n in range(0, BYTES, 256))
FILL = "".join(f"ld.global.b32 %r20, [%rd22+{n}];\nst.shared.b32 [%r10+{n}], %r20;\n" for n in range(0, BYTES, 256))
MEET = "bar.sync 0;\n"
STORE = "@%p2 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {X, Y}], [%r9];\n"
COMMIT, READ, DONE = (f"cp.async.bulk.{x};\n" for x in ("commit_group", "wait_group.read 0", "wait_group 0"))


def tensor_map(swizzle: int, shape: tuple[int, int] = (COLUMNS, ROWS)) -> str:
    wide = (swizzle or 128) // 4
    fields = {
        "global_address": (64, "%rd0"), "rank": (32, 1), "elemtype": (32, 2), "swizzle_mode": (32, MODE[swizzle]),
        "interleave_layout": (32, 0), "fill_mode": (32, 0), "global_stride": (64, f"0, {4 * COLUMNS}"),
    }  # fmt: skip
    lines = "".join("@%p2 " + REPLACE.format(name, *value) for name, value in fields.items())
    for n, sizes in enumerate(zip((wide, BYTES // 4 // wide), shape, (1, 1), strict=True)):
        for name, size in zip(("box_dim", "global_dim", "element_stride"), sizes, strict=True):
            lines += "@%p2 " + REPLACE.format(name, 32, f"{n}, {size}")
    return BEGIN + "@%p1 st.shared.b32 [%r7], 0;\nbar.warp.sync -1;\n" + lines + PUBLISH


def at(text: str, x: int, y: int) -> str:
    return text.replace("X", str(x)).replace("Y", str(y))


LOADED = tensor_map(128) + INIT + FENCE + MEET + EXPECT + at(LOAD, 4, 8) + WAIT + OUT
STORED = tensor_map(128) + FILL + FENCE + MEET + at(STORE, 4, 8) + COMMIT + DONE


def arrays() -> list[np.ndarray]:
    """The matrix, the box in the order of shared memory, and space for the map."""
    matrix = aligned(np.arange(1, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS), np.uint32)
    return [matrix, aligned(np.arange(1, BYTES // 4 + 1), np.uint32), aligned(np.zeros(128), np.uint8)]


def in_order(box: np.ndarray, swizzle: int) -> np.ndarray:
    """A box as shared memory has it, by the figures of the PTX manual."""
    memory = np.zeros(BYTES // 4, np.uint32)
    wide = box.shape[1] * 4
    for r, row in enumerate(box):
        for chunk in range(wide // 16):
            place = r * wide + (chunk ^ (r * wide // 128 % 8 % (swizzle // 16 or 1))) * 16
            memory[place // 4 : place // 4 + 4] = row[chunk * 4 : chunk * 4 + 4]
    return memory


def window(matrix: np.ndarray, x: int, y: int, swizzle: int) -> tuple[np.ndarray, np.ndarray]:
    """A box of a matrix, zero outside, and what of it is inside."""
    wide = (swizzle or 128) // 4
    rows, columns = np.arange(BYTES // 4 // wide)[:, None] + y, np.arange(wide)[None] + x
    inside = (rows >= 0) & (rows < ROWS) & (columns >= 0) & (columns < COLUMNS)
    return np.where(inside, matrix[rows.clip(0, ROWS - 1), columns.clip(0, COLUMNS - 1)], 0), inside


def execute(body: str, given: list[np.ndarray]) -> None:
    run(body, given, 64, shared=4096, races_shared=True, races_global=True)


PLACES = [(0, 0), (4, 8), (-4, -3), (40, 36), (100, 0)]


@pytest.mark.parametrize(("x", "y"), PLACES)
@pytest.mark.parametrize("swizzle", MODE)
def test_a_box_is_loaded(swizzle, x, y):
    given = arrays()
    execute(tensor_map(swizzle) + INIT + FENCE + MEET + EXPECT + at(LOAD, x, y) + WAIT + OUT, given)
    assert np.array_equal(given[1], in_order(window(given[0], x, y, swizzle)[0], swizzle))


@pytest.mark.parametrize(("x", "y"), PLACES)
@pytest.mark.parametrize("swizzle", MODE)
def test_a_box_is_stored(swizzle, x, y):
    given = arrays()
    before = given[0].copy()
    execute(tensor_map(swizzle) + FILL + FENCE + MEET + at(STORE, x, y) + COMMIT + DONE, given)
    stored, inside = window(given[0], x, y, swizzle)
    assert np.array_equal(in_order(stored, swizzle), np.where(in_order(inside, swizzle), given[1], 0))
    places = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    others = np.setdiff1d(places, window(places, x, y, swizzle)[0][inside])
    assert np.array_equal(given[0].flat[others], before.flat[others])


def test_a_store_is_there_at_its_wait():
    """Until then, another thread of the block reads what global memory had before; after the kernel all is there."""
    look = "ld.global.b32 %r21, [%rd0];\nbar.sync 0;\n@%p2 st.global.b32 [%rd1], %r21;\n"
    for wait, seen in ((DONE, 101), (READ, 1)):
        given = arrays()
        given[1] += 100
        execute(tensor_map(128) + FILL + FENCE + MEET + at(STORE, 0, 0) + COMMIT + wait + look, given)
        assert given[0][0, 0] == 101
        assert given[1][0] == seen


INVALID = "@%p2 mbarrier.inval.shared::cta.b64 [%r8];\n"
LESS = EXPECT.replace(str(BYTES), str(BYTES // 2))
NEVER, UNDER_WAY = "waits for an mbarrier whose phase never ends", " a copy to it is under way"
UNFENCED = "no fence.proxy.async since shared memory was written"
ADD = "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r8], 1024;\n"
WRONG_LOADS = {
    "no wait": (WAIT, "", "shared memory read while" + UNDER_WAY),
    "promised too much": (EXPECT, EXPECT.replace(str(BYTES), str(BYTES + 16)), NEVER),
    "promised too little": (EXPECT, LESS, NEVER),
    "nothing promised": (EXPECT, "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r8];\n", "read while" + UNDER_WAY),
    "nobody arrives": (EXPECT, ADD, NEVER),
    "two copies, one promised": (EXPECT, EXPECT + at(LOAD, 0, 0).replace("[%r9]", "[%r9+1024]") + MEET, "under way"),
    "looks once": ("@!done bra.uni look;", "", "shared memory read while" + UNDER_WAY),
    "one warp waits": (WAIT, f"@!%p1 bra $L_on;\n{WAIT}$L_on:\n", "shared memory read while" + UNDER_WAY),
    "mbarrier not fenced": (FENCE + MEET, MEET, "no fence.proxy.async since an mbarrier was initialised"),
    "mbarrier of another warp": (FENCE + MEET, FENCE, "race of warps"),
    "no mbarrier": (INIT, "", "no mbarrier"),
    "initialised again": (INIT, INIT + INIT, "an mbarrier is there already"),
    "mbarrier for nobody": (INIT, INIT.replace(", 1", ", 0"), r"arrivals of an mbarrier \(0, allowed are 1"),
    "map not fenced": (PUBLISH.split("\n")[1], "", "no fence.proxy.tensormap"),
    "buffer written": (WAIT, f"@%p2 st.shared.b32 [%r9], 5;\n{WAIT}", "shared memory written while" + UNDER_WAY),
    "buffer loaded again": (EXPECT, EXPECT + at(LOAD, 0, 0), "shared memory copied to while" + UNDER_WAY),
    "buffer written before": (INIT + FENCE, INIT + FENCE + "@%p2 st.shared.b32 [%r9], 5;\n", UNFENCED),
    "mbarrier read": (WAIT, f"ld.shared.b32 %r21, [%r8];\n{WAIT}", "shared memory read where an mbarrier is"),
    "mbarrier written": (WAIT, f"@%p2 st.shared.b32 [%r8], 5;\n{WAIT}", "shared memory written where an mbarrier is"),
    "arrived twice": (WAIT, WAIT + "mbarrier.arrive.shared::cta.b64 _, [%r8], 2;\n", "more arrivals than"),
    "invalid too early": (WAIT, INVALID, "made invalid while copies are under way"),
    "invalid and waited for": (WAIT, WAIT + MEET + INVALID + MEET + WAIT, "no mbarrier"),
    "never waited for": (WAIT + OUT, "", "ends with a copy to shared memory under way"),
    "box at 64 bytes": ("[%r9], [%rd2", "[%r9+64], [%rd2", "misaligned"),
    "box beyond": ("[%r9], [%rd2", "[%r9+2560], [%rd2", "outside shared memory"),
}  # fmt: skip
WRONG_STORES = {
    "not fenced": (FENCE, "", UNFENCED),
    "other warps not waited for": (FENCE + MEET, FENCE, "race of warps"),
    "nothing there": (FILL, "", "shared memory read before it is written"),
    "written under way": (DONE, f"@%p2 st.shared.b32 [%r9], 5;\n{DONE}", "written that a bulk store under way reads"),
    "not committed": (COMMIT, "", "ends with a bulk store that nobody waited for"),
    "not waited for": (DONE, "", "ends with a bulk store that nobody waited for"),
}
WRONG = [pytest.param(LOADED, *each, id=f"load: {name}") for name, each in WRONG_LOADS.items()]
WRONG += [pytest.param(STORED, *each, id=f"store: {name}") for name, each in WRONG_STORES.items()]


@pytest.mark.parametrize(("body", "old", "new", "kind"), WRONG)
def test_what_a_load_or_a_store_must_not(body, old, new, kind):
    assert old in body
    refused(kind, body.replace(old, new), arrays(), threads=64, races_shared=True)


def test_a_map_larger_than_its_tensor():
    body = LOADED.replace(tensor_map(128), tensor_map(128, (COLUMNS, ROWS + 8)))
    refused(
        r"outside all allocations \(4 bytes of a box\)", at(body, 0, 0).replace(", 8}", ", 36}"), arrays(), threads=64
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("element_stride.shared::cta.b1024.b32 [%rd20], 0, 1", "element_stride.shared::cta.b1024.b32 [%rd20], 0, 2"),
        ("interleave_layout.shared::cta.b1024.b32 [%rd20], 0", "interleave_layout.shared::cta.b1024.b32 [%rd20], 1"),
        ("fill_mode.shared::cta.b1024.b32 [%rd20], 0", "fill_mode.shared::cta.b1024.b32 [%rd20], 1"),
        ("box_dim.shared::cta.b1024.b32 [%rd20], 0, 32", "box_dim.shared::cta.b1024.b32 [%rd20], 0, 16"),
    ],
)
def test_a_map_that_is_not_known(old, new):
    assert old in LOADED
    with pytest.raises(PtxError, match=r"line \d+: @%p2 cp.async.bulk.tensor"):
        run(LOADED.replace(old, new), arrays(), 64)


def test_phases_follow_one_another():
    """The second box comes to the other half, with the other parity."""
    again = (EXPECT + at(LOAD, 0, 16)).replace("[%r9]", "[%r9+1024]") + WAIT.replace("[%r8], 0", "[%r8], 1").replace(
        "look", "again"
    )
    given = arrays()
    body = LOADED.replace(OUT, MEET + again + "add.s32 %r10, %r10, 1024;\n" + OUT)
    execute(body, given)
    assert np.array_equal(given[1], in_order(window(given[0], 0, 16, 128)[0], 128))


def second(text: str) -> str:
    """The same for another mbarrier, and a box behind the first."""
    return text.replace("[%r8]", "[%r8+8]").replace("[%r9]", "[%r9+1024]")


BOTH = INIT + second(INIT) + FENCE + MEET + EXPECT + second(EXPECT) + at(LOAD, 4, 8) + second(at(LOAD, 4, 8))


@pytest.mark.parametrize("passed_on", [False, True])
def test_what_a_warp_has_seen(passed_on):
    """A warp that waited for the other box may not touch the first, unless who has seen it arrives where it waits."""
    body = tensor_map(128) + BOTH + "@%p1 bra $L_first;\n" + second(WAIT) + "bra $L_on;\n$L_first:\n" + WAIT
    if passed_on:
        body = body.replace(second(EXPECT), second(EXPECT).replace("arrive.expect_tx", "expect_tx").replace(" _,", ""))
        body += "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r8+8];\n"
    body += "$L_on:\n" + OUT
    if passed_on:
        execute(body, given := arrays())
        assert np.array_equal(given[1], in_order(window(given[0], 4, 8, 128)[0], 128))
    else:
        refused("by a warp that has not waited", body, arrays(), threads=64)


def test_who_arrives_comes_later_in_the_text():
    """One warp looks at an mbarrier, over and over, before the other arrives further down."""
    body = BEGIN + INIT.replace(", 1;", ", N;") + MEET
    body += f"@%p1 bra $L_arrive;\n{WAIT}bra $L_end;\n$L_arrive:\nmbarrier.arrive.shared::cta.b64 _, [%r8];\n$L_end:\n"
    execute(body.replace("N;", "32;") + "st.global.b32 [%rd22], 7;", given := arrays())
    assert given[1][:64].tolist() == [7] * 64
    refused("never ends", body.replace("N;", "33;"), arrays(), threads=64)
