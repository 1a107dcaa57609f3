"""Threads that go different ways, shuffles and votes, atomics, local memory, and what is counted."""

import numpy as np
import pytest

from tests.compiled.hand_written import OWN, aligned, refused, run
from tests.compiled.ptx.counters import Traffic

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


@pytest.mark.parametrize(
    ("mode", "amount", "source"),
    [
        ("bfly", 5, lambda n: n ^ 5),
        ("idx", 3, lambda n: 3),
        ("up", 2, lambda n: n - 2 if n >= 2 else n),
        ("down", 30, lambda n: n + 30 if n < 2 else n),
    ],
)
def test_shuffles(mode, amount, source):
    clamp = 0 if mode == "up" else 31
    body = f"shfl.sync.{mode}.b32 %r2, %r0, {amount}, {clamp}, -1;\n"
    assert results(body) == [source(n) for n in range(32)]


def test_votes():
    assert results("setp.lt.u32 %p1, %r0, 3;\nvote.sync.ballot.b32 %r2, %p1, -1;\n") == [7] * 32


LOCAL = ".local .align 16 .b8 __local_depot0[32];\nmov.b64 %rd20, __local_depot0;\n"


def test_local_memory_is_a_thread_s_own():
    """Written number by number, at places that differ between threads, and read as a vector."""
    body = LOCAL + "mul.lo.s32 %r1, %r0, 3;\nst.local.v4.b32 [%rd20+16], {0, 0, 0, 0};\n"
    body += "and.b32 %r3, %r0, 3;\nmul.wide.u32 %rd21, %r3, 4;\nadd.s64 %rd22, %rd20, %rd21;\n"
    body += "st.local.b32 [%rd22+16], %r1;\nld.local.v4.b32 {%r11, %r12, %r13, %r14}, [%rd20+16];\n"
    body += "add.s32 %r2, %r11, %r12;\nadd.s32 %r2, %r2, %r13;\nadd.s32 %r2, %r2, %r14;\n"
    assert results(body, 64) == [3 * n for n in range(64)]


@pytest.mark.parametrize(
    ("access", "kind"),
    [
        ("ld.local.b32 %r2, [%rd20];", "before it is written"),
        ("st.local.b32 [%rd20+32], 0;", "outside local memory"),
        ("st.local.b32 [%rd20+2], 0;", "misaligned"),
    ],
)
def test_local_memory_is_checked(access, kind):
    refused(kind, OWN + LOCAL + access, [aligned([0] * 32, np.uint32)])


X = aligned(np.zeros(32 * 64), np.uint32)


@pytest.mark.parametrize(("stride", "sectors"), [(0, 1), (1, 4), (2, 8), (8, 32), (16, 32)])
def test_sectors_of_global_memory(stride, sectors):
    body = f"mul.wide.u32 %rd10, %r0, {4 * stride};\nadd.s64 %rd11, %rd0, %rd10;\nst.global.b32 [%rd11], 0;"
    bytes_, needed = (128, 4) if stride else (4, 1)
    assert [*run(body, [X], memory_traffic=True).traffic.values()] == [Traffic(1, bytes_, sectors, needed)]


PLACE = "mov.b32 %r6, global_smem;\nmad.lo.s32 %r7, %r0, STRIDE, %r6;\n"
STORE, WIDE_STORE = "st.shared.b32 [%r7], 0;", "st.shared.v4.b32 [%r7], {%r0, %r0, %r0, %r0};"
COPY = "cp.async.ca.shared.global [%r7], [%rd0], 4;\ncp.async.wait_all;"


@pytest.mark.parametrize(
    ("access", "stride", "wavefronts", "least"),
    [
        *((STORE, 4 * stride, n, 1) for stride, n in ((1, 1), (2, 2), (3, 1), (4, 4), (32, 32), (33, 1), (0, 1))),
        *((COPY, stride, stride // 4, 1) for stride in (4, 8, 128)),
        (WIDE_STORE, 16, 4, 4),
        (WIDE_STORE, 128, 32, 4),
    ],
)
def test_bank_conflicts(access, stride, wavefronts, least):
    body = PLACE.replace("STRIDE", str(stride)) + access
    traffic = run(body, [X], shared=32 * 64 * 4, memory_traffic=True).traffic
    found = [each for (space, *_), each in traffic.items() if space == "shared"]
    assert found == [Traffic(1, 128 * least, wavefronts, least)]
