"""wgmma: D = A B^T of 64 x 16 and 64 x 16, in every layout of shared memory, and with accumulators of both widths."""

import numpy as np
import pytest

from tests.compiled.hand_written import aligned, bf16, f16, refused, run

N, K = 64, 16
CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # of a swizzle, in a descriptor
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-8, 8, (rows, K)).astype(np.float32) for rows in (64, N))
FILL = """mov.b32 %r1, 0;
mov.b32 %r6, global_smem;
$L_f:
shl.b32 %r3, %r0, 4;
mad.lo.s32 %r2, %r1, 2048, %r3;
cvt.u64.u32 %rd10, %r2;
add.s64 %rd11, %rd0, %rd10;
ld.global.v4.b32 {%r11,%r12,%r13,%r14}, [%rd11];
add.s32 %r4, %r6, %r2;
st.shared.v4.b32 [%r4], {%r11,%r12,%r13,%r14};
add.s32 %r1, %r1, 1;
setp.lt.s32 %p1, %r1, 16;
@%p1 bra $L_f;
fence.proxy.async.shared::cta;
bar.sync 0;
bfe.u32 %r5, %r6, 4, 14;
cvt.u64.u32 %rd20, %r5;
"""
FENCE, WAIT = "wgmma.fence.sync.aligned;\n", "wgmma.wait_group.sync.aligned 0;\n"


def place(rows: int, r: int, k: int, swizzle: int, transposed: bool) -> int:
    """The byte of element [r, k] of an operand of 16 bits, swizzled, by the figures of the PTX manual."""
    if not transposed and swizzle == 0:
        return r // 8 * 256 + k // 8 * 128 + r % 8 * 16 + k % 8 * 2
    if not transposed:
        return r * swizzle + ((k // 8) ^ (r % 8 * swizzle // 128)) * 16 + k % 8 * 2
    if swizzle == 0:
        return r // 8 * 128 + k // 8 * (rows // 8 * 128) + k % 8 * 16 + r % 8 * 2
    wide = swizzle // 2  # rows of an atom
    chunk = (r % wide // 8) ^ (k % 8 * swizzle // 128)
    return r // wide * 16 * swizzle + k * swizzle + chunk * 16 + r % 8 * 2


def offsets(rows: int, swizzle: int, transposed: bool) -> tuple[int, int]:
    """Leading and stride."""
    if not transposed:
        return (16, 8 * swizzle) if swizzle else (128, 256)
    return (16 * swizzle, 8 * swizzle) if swizzle else (rows // 8 * 128, 128)


def image(x, bits, swizzle: int, transposed: bool):
    memory = np.zeros(8192, np.uint16)
    for r, row in enumerate(x):
        for k, value in enumerate(row):
            memory[place(len(x), r, k, swizzle, transposed) // 2] = bits(value)
    return memory


def program(swizzle: int, trans: tuple[int, int], kind: str = "f32.bf16.bf16", times: int = 1) -> str:
    """Fill shared memory, multiply, and put the accumulators into the second array."""
    registers = [f"%r{100 + i}" for i in range(N // 2 if kind.startswith("f32") else N // 4)]
    body = "".join(f"mov.b32 {r}, 0;\n" for r in registers) + FILL
    for d, rows, transposed, extra in ((21, 64, trans[0], 0), (22, N, trans[1], 1024)):
        leading, stride = offsets(rows, swizzle, bool(transposed))
        fixed = CODE[swizzle] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
        body += f"add.s64 %rd{d}, %rd20, {fixed + extra};\n"
    body += FENCE
    for scale in range(times):
        body += (
            f"wgmma.mma_async.sync.aligned.m64n{N}k16.{kind} {{{','.join(registers)}}}, %rd21, %rd22, {scale}, 1, 1, "
        )
        body += f"{trans[0]}, {trans[1]};\n"
    body += f"wgmma.commit_group.sync.aligned;\n{WAIT}mul.wide.u32 %rd30, %r0, {len(registers) * 4};\n"
    body += "add.s64 %rd31, %rd1, %rd30;\n"
    return body + "".join(f"st.global.b32 [%rd31+{4 * i}], {r};\n" for i, r in enumerate(registers))


def arrays(bits, dtype, swizzle: int, trans: tuple[int, int]):
    images = [image(x, bits, swizzle, bool(t)) for x, t in zip((A, B), trans, strict=True)]
    return aligned(np.concatenate(images), np.uint16), aligned(np.zeros((128, N // 2)), dtype)


def execute(body: str, given) -> None:
    run(body, list(given), 128, shared=32768, races_shared=True)


def matrix(out):
    """D, of what the threads had: element pairs of rows 8 apart."""
    found = np.zeros((64, N))
    for lane in range(128):
        for i in range(N // 2):
            row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % 2)
            found[row, i // 4 * 8 + lane % 4 * 2 + i % 2] = out[lane, i]
    return found


@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("swizzle", CODE)
def test_layouts(swizzle, trans):
    given = arrays(bf16, np.float32, swizzle, trans)
    execute(program(swizzle, trans), given)
    assert np.array_equal(matrix(given[1]), A.astype(np.float64) @ B.T)


def test_accumulators_of_16_bits():
    """Two to a register; the second product is added to the first. All numbers are small integers, hence exact."""
    given = arrays(f16, np.float16, 128, (0, 0))
    execute(program(128, (0, 0), "f16.f16.f16", times=2), given)
    assert np.array_equal(matrix(given[1]), 2 * A.astype(np.float64) @ B.T)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("no fence.proxy.async", "fence.proxy.async.shared::cta;\n", ""),
        ("no wgmma.fence", FENCE, ""),
        ("register written since wgmma.fence", FENCE, f"{FENCE}mov.b32 %r100, 5;\n"),
        ("nobody waited for", WAIT, ""),
        ("register in flight copied", WAIT, f"mov.b32 %r99, %r100;\n{WAIT}"),
        ("written that a wgmma under way reads", WAIT, f"st.shared.b32 [%r6], 77;\n{WAIT}"),
        ("read before it is written", "%p1, %r1, 16", "%p1, %r1, 9"),
    ],
    ids=lambda text: text.replace(" ", "_") if text[:1].islower() and "\n" not in text else "",
)
def test_what_must_not_be(kind, old, new):
    body = program(128, (0, 0))
    assert old in body
    given = arrays(bf16, np.float32, 128, (0, 0))
    refused(kind, body.replace(old, new), list(given), threads=128, shared=32768, races_shared=True)
