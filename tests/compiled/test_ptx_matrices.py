"""ldmatrix, stmatrix, mma.sync and wgmma: which thread has which element, by the tables of the PTX manual."""

import numpy as np
import pytest

from tests.compiled.hand_written import aligned, bf16, f32, refused, run

RNG = np.random.default_rng(0)
LANE = np.arange(32)
ROWS_OF_THREADS = """mul.wide.u32 %rd10, %r0, 16;
add.s64 %rd11, %rd0, %rd10;
ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd11];
shl.b32 %r5, %r0, 4;
mov.b32 %r6, global_smem;
add.s32 %r7, %r6, %r5;
st.shared.v4.b32 [%r7], {%r1,%r2,%r3,%r4};
bar.sync 0;
"""
PUT = "add.s64 %rd12, %rd1, %rd10;\nst.global.v4.b32 [%rd12], {%r11,%r12,%r13,%r14};"


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_of_shared_memory(trans):
    tile, out = aligned(RNG.integers(0, 60000, (32, 8)), np.uint16), aligned(np.zeros((32, 4)), np.uint32)
    load = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r11,%r12,%r13,%r14}}, [%r7];\n"
    run(f"{ROWS_OF_THREADS}{load}{PUT}", [tile, out])
    parts, matrices = out.view(np.uint16).reshape(32, 4, 2), tile.reshape(4, 8, 8)
    for lane in range(32):
        for i, matrix in enumerate(matrices):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                assert parts[lane, i, half] == (matrix[column, row] if trans else matrix[row, column])
    store = f"bar.sync 0;\nstmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7], {{%r11,%r12,%r13,%r14}};\n"
    back = "bar.sync 0;\nld.shared.v4.b32 {%r11,%r12,%r13,%r14}, [%r7];\n"
    run(f"{ROWS_OF_THREADS}{load}{store}{back}{PUT}", [tile, out])
    assert np.array_equal(out.view(np.uint16).reshape(32, 8), tile)


def operand(x, kind):
    """Registers of each thread, `[32, 4]`, and how many there are: of A, or of B transposed, `[16 or 8, k]`."""
    out, tall = aligned(np.zeros((32, 4)), np.uint32), len(x) // 8
    count = x.shape[1] // (4 if kind == "tf32" else 8) * tall
    for r in range(count):
        rows, part = LANE // 4 + 8 * (r % tall), r // tall
        if kind == "tf32":
            out[:, r] = x[rows, LANE % 4 + 4 * part].view(np.uint32)
        else:
            pairs = x[rows[:, None], LANE[:, None] % 4 * 2 + 8 * part + [0, 1]]
            halves = pairs.astype(np.float16).view(np.uint16) if kind == "f16" else pairs.view(np.uint32) >> 16
            out[:, r] = halves[:, 0] | halves[:, 1].astype(np.uint32) << 16
    return out, count


def representable(x, kind):
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    return (x.view(np.uint32) & (0xFFFF0000 if kind == "bf16" else 0xFFFFE000)).view(np.float32)


def matrix(out):
    """D, of what the threads had: pairs of columns, of rows 8 apart."""
    actual = np.zeros((len(out) // 2, 2 * out.shape[1]))
    for thread, elements in enumerate(out):
        for i, element in enumerate(elements):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            actual[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = element
    return actual


@pytest.mark.parametrize(("k", "kind"), [(16, "f16"), (8, "tf32"), (16, "bf16")])
def test_products(k, kind):
    """D = A B + 1."""
    a, b = (representable(RNG.standard_normal(s).astype(np.float32), kind) for s in ((16, k), (k, 8)))
    (of_a, na), (of_b, nb) = operand(a, kind), operand(np.ascontiguousarray(b.T), kind)
    ra, rb = (",".join(f"%r{start + i}" for i in range(n)) for start, n in ((1, na), (5, nb)))
    body = "mul.wide.u32 %rd10, %r0, 16;\nadd.s64 %rd11, %rd0, %rd10;\nadd.s64 %rd13, %rd1, %rd10;\n"
    body += "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd11];\nld.global.v4.b32 {%r5,%r6,%r7,%r8}, [%rd13];\n"
    body += f"mov.b32 %r20, {f32(1)};\nadd.s64 %rd12, %rd2, %rd10;\n"
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 "
    body += f"{{%r11,%r12,%r13,%r14}}, {{{ra}}}, {{{rb}}}, {{%r20,%r20,%r20,%r20}};\n"
    out = aligned(np.zeros((32, 4)), np.float32)
    run(f"{body}st.global.v4.b32 [%rd12], {{%r11,%r12,%r13,%r14}};", [of_a, of_b, out])
    exact = a.astype(np.float64) @ b + 1
    assert np.abs(matrix(out) - exact).max() <= k * 2**-24 * 16  # sums of fp32, of up to 16


# ---- wgmma: D = A B^T of 64 x 16 and 64 x 16, in every layout of shared memory

N, K = 64, 16
CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # of a swizzle, in a descriptor
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


def program(swizzle: int, trans: tuple[int, int]) -> str:
    """Fill shared memory, multiply, and put the accumulators into the second array."""
    registers = [f"%r{100 + i}" for i in range(N // 2)]
    body = "".join(f"mov.b32 {r}, 0;\n" for r in registers) + FILL
    for d, rows, transposed, extra in ((21, 64, trans[0], 0), (22, N, trans[1], 1024)):
        leading, stride = offsets(rows, swizzle, bool(transposed))
        fixed = CODE[swizzle] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
        body += f"add.s64 %rd{d}, %rd20, {fixed + extra};\n"
    body += f"{FENCE}wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 "
    body += f"{{{','.join(registers)}}}, %rd21, %rd22, 0, 1, 1, {trans[0]}, {trans[1]};\n"
    body += f"wgmma.commit_group.sync.aligned;\n{WAIT}mul.wide.u32 %rd30, %r0, {len(registers) * 4};\n"
    body += "add.s64 %rd31, %rd1, %rd30;\n"
    return body + "".join(f"st.global.b32 [%rd31+{4 * i}], {r};\n" for i, r in enumerate(registers))


def arrays(swizzle: int, trans: tuple[int, int]):
    images = [image(x, bf16, swizzle, bool(t)) for x, t in zip((A, B), trans, strict=True)]
    return aligned(np.concatenate(images), np.uint16), aligned(np.zeros((128, N // 2)), np.float32)


def execute(body: str, given) -> None:
    run(body, list(given), 128, shared=32768, races_shared=True)


@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("swizzle", CODE)
def test_layouts_of_shared_memory(swizzle, trans):
    given = arrays(swizzle, trans)
    execute(program(swizzle, trans), given)
    assert np.array_equal(matrix(given[1]), A.astype(np.float64) @ B.T)


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
def test_a_wrong_wgmma(kind, old, new):
    body = program(128, (0, 0))
    assert old in body
    given = arrays(128, (0, 0))
    refused(kind, body.replace(old, new), list(given), threads=128, shared=32768, races_shared=True)
