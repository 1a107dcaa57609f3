"""What the executor runs and refuses: programs written by hand, each wrong one beside a right one."""

import numpy as np
import pytest

from tests.compiled.hand_written import OWN, aligned, refused, run
from tests.compiled.ptx.machine import KernelFault
from tests.compiled.ptx.text import PtxError

X, OUT = aligned(np.arange(64), np.uint32), aligned(np.zeros(64), np.uint32)


@pytest.mark.parametrize(
    ("kind", "access"),
    [
        ("misaligned", "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd11];"),
        ("outside all allocations", "ld.global.b32 %r1, [%rd11+132];"),
        ("outside all allocations", "ld.global.b32 %r1, [%rd11+-4];"),
        ("outside all allocations", "st.global.b32 [%rd11+256], 0;"),
        ("before it is written", "ld.shared.b32 %r1, [%r7];"),
        ("outside shared memory", "st.shared.b32 [%r7+4096], 0;"),
        ("misaligned", "st.shared.b64 [%r7], 0;"),
    ],
)
def test_addresses(kind, access):
    refused(kind, OWN + access, [aligned(np.arange(64), np.uint32)[:64]])


COPY = "cp.async.ca.shared.global [%r7], [%rd11], 4;\ncp.async.commit_group;\n"
READ = "ld.shared.b32 %r1, [%r7];\nadd.s64 %rd12, %rd1, %rd10;\nst.global.b32 [%rd12], %r1;"


def test_a_copy_arrives_at_its_wait():
    run(f"{OWN}{COPY}cp.async.wait_group 0;\n{READ}", [X, OUT], 64, races_shared=True)
    assert np.array_equal(X, OUT)


@pytest.mark.parametrize(
    "body",
    [
        COPY + READ,
        f"{COPY}cp.async.wait_group 1;\n{READ}",  # waits for others
        COPY.replace("cp.async.commit_group;\n", "") + f"cp.async.wait_group 0;\n{READ}",  # not committed
        f"{COPY}st.shared.b32 [%r7], 0;",
        COPY + COPY,
    ],
)
def test_memory_of_an_unfinished_copy_is_not_accessed(body):
    refused("under way", OWN + body, [X, OUT], threads=64)


OTHER = "xor.b32 %r8, %r5, 128;\nadd.s32 %r9, %r6, %r8;\n"  # %r9: the place of a thread of the other warp
EXCHANGE = f"{OWN}{OTHER}st.shared.b32 [%r7], %r0;\nBAR\nld.shared.b32 %r1, [%r9];\n"
AGAIN = EXCHANGE.replace("BAR", "bar.sync 0;") + "BAR\nadd.s32 %r2, %r0, 77;\nst.shared.b32 [%r7], %r2;"


@pytest.mark.parametrize("body", [EXCHANGE, AGAIN])
def test_warps_meet_at_barriers(body):
    run(body.replace("BAR", "bar.sync 0;"), [X], 64, races_shared=True)
    refused("race of warps", body.replace("BAR\n", ""), [X], threads=64, races_shared=True)


def test_what_warps_do_to_one_place():
    copied = EXCHANGE.replace("BAR", "bar.sync 0;") + COPY  # over what another warp reads
    refused("race of warps", copied, [X], threads=64, races_shared=True)
    run(f"{OWN}st.shared.b32 [%r6], 5;", [X], 64, races_shared=True)  # the same value, as Triton does
    refused("race of warps", f"{OWN}st.shared.b32 [%r6], %r0;", [X], threads=64, races_shared=True)


BLOCK = "mov.u32 %r3, %ctaid.x;\n"


@pytest.mark.parametrize(
    "body",
    [
        f"{BLOCK}st.global.b32 [%rd0], %r3;",
        f"{BLOCK}setp.eq.s32 %p1, %r3, 0;\n@%p1 st.global.b32 [%rd0+128], 1;\nld.global.b32 %r1, [%rd0+128];",
    ],
)
def test_two_blocks_touch_one_place(body):
    run(body, [X], races_global=True)
    refused("race of blocks", body, [X], grid=2, races_global=True)


def test_two_blocks_add_to_one_place():
    one = aligned([0], np.float32)
    run("atom.global.gpu.relaxed.add.f32 %r1, [%rd0], 0f3F800000;", [one], 32, 2, races_global=True)
    assert one[0] == 64


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("barrier", "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $L_x;\nbar.sync 0;\n$L_x:\nbar.sync 1;\n"),
        (
            "threads missing",
            "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $L_x;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n$L_x:\n",
        ),
        ("does it end", "$L_x:\nbra.uni $L_x;"),
    ],
)
def test_threads(kind, body):
    refused(kind, body, [X], threads=64, steps=100)


@pytest.mark.parametrize("line", ["tex.2d.v4.f32.f32 {%r1}, [%rd0];", "add.sat.s32 %r1, %r0, 1;", "membar.gl;"])
def test_what_it_does_not_know_it_says(line):
    with pytest.raises(PtxError, match=r"line \d+: .*(no such instruction here|modifier sat)"):
        run(line, [X])


def test_a_register_that_was_not_written():
    with pytest.raises((PtxError, KernelFault), match="%r77"):
        run("add.s32 %r1, %r77, 1;", [X])


# ---- threads that go different ways

PUT = "st.global.b32 [%rd11], %r2;"


def results(body: str, threads: int = 32) -> list[int]:
    """What each thread leaves in %r2."""
    out = aligned(np.zeros(threads), np.uint32)
    run(OWN + body + PUT, [out], threads)
    return [int(x) for x in out]


LOOP = """mov.b32 %r1, 0;
mov.b32 %r2, 0;
$L_1:
add.s32 %r2, %r2, %r1;
add.s32 %r1, %r1, 1;
setp.le.s32 %p1, %r1, %r0;
@%p1 bra $L_1;
"""
WAYS = """and.b32 %r1, %r0, 1;
setp.eq.b32 %p1, %r1, 0;
@%p1 bra $L_2;
mov.b32 %r2, 5;
bra.uni $L_3;
$L_2:
mov.b32 %r2, 7;
$L_3:
"""


def test_loops_of_different_lengths_and_two_ways():
    assert results(LOOP, 64) == [n * (n + 1) // 2 for n in range(64)]
    assert results(WAYS, 64) == [7, 5] * 32


def test_a_barrier_waits_for_those_that_live():
    assert results("mov.b32 %r2, 1;\nsetp.gt.u32 %p1, %r0, 40;\n@%p1 ret;\nbar.sync 0;\n", 64) == [1] * 41 + [0] * 23


@pytest.mark.parametrize(("mode", "source"), [("bfly", lambda n: n ^ 5), ("idx", lambda n: 5)])
def test_shuffles(mode, source):
    assert results(f"shfl.sync.{mode}.b32 %r2, %r0, 5, 31, -1;\n") == [source(n) for n in range(32)]
