"""ldmatrix, stmatrix and mma.sync: which thread has which element, by the tables of the PTX manual."""

import numpy as np
import pytest

from tests.compiled.hand_written import aligned, bf16, f16, f32, run

RNG = np.random.default_rng(0)
FILL = """mul.wide.u32 %rd10, %r0, 16;
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
    run(f"{FILL}{load}{PUT}", [tile, out])
    parts, matrices = out.view(np.uint16).reshape(32, 4, 2), tile.reshape(4, 8, 8)
    for lane in range(32):
        for i, matrix in enumerate(matrices):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                assert parts[lane, i, half] == (matrix[column, row] if trans else matrix[row, column])
    store = f"bar.sync 0;\nstmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7], {{%r11,%r12,%r13,%r14}};\n"
    back = "bar.sync 0;\nld.shared.v4.b32 {%r11,%r12,%r13,%r14}, [%r7];\n"
    run(f"{FILL}{load}{store}{back}{PUT}", [tile, out])
    assert np.array_equal(out.view(np.uint16).reshape(32, 8), tile)


def fragments(a, b, kind):
    """The registers of A and B of each thread, from matrices of 16 x k and k x 8."""
    count = a.shape[1] // (4 if kind == "tf32" else 8) * 2
    if kind == "tf32":
        of_a = [[f32(a[t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)]) for r in range(count)] for t in range(32)]
        of_b = [[f32(b[t % 4 + 4 * r, t // 4]) for r in range(count // 2)] for t in range(32)]
        return of_a, of_b
    bits = bf16 if kind == "bf16" else f16
    pair = lambda u, v: bits(u) | bits(v) << 16  # noqa: E731
    rows = lambda t, r: a[t // 4 + 8 * (r % 2), t % 4 * 2 + 8 * (r // 2) :][:2]  # noqa: E731
    columns = lambda t, r: b[t % 4 * 2 + 8 * r :, t // 4][:2]  # noqa: E731
    of_a = [[pair(*rows(t, r)) for r in range(count)] for t in range(32)]
    return of_a, [[pair(*columns(t, r)) for r in range(count // 2)] for t in range(32)]


def representable(x, kind):
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    return (x.view(np.uint32) & (0xFFFF0000 if kind == "bf16" else 0xFFFFE000)).view(np.float32)


def multiply(a, b, kind, of_d, addend: int, out) -> None:
    """D = A B + addend, whose bits are those of a register; of_d: as many registers as D has."""
    of_a, of_b = fragments(a, b, kind)
    arrays = [aligned([r + [0] * (4 - len(r)) for r in x], np.uint32) for x in (of_a, of_b)]
    body = "mul.wide.u32 %rd10, %r0, 16;\nadd.s64 %rd11, %rd0, %rd10;\nadd.s64 %rd12, %rd1, %rd10;\n"
    body += "ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd11];\nld.global.v4.b32 {%r5,%r6,%r7,%r8}, [%rd12];\n"
    body += f"mul.wide.u32 %rd10, %r0, {4 * of_d};\nadd.s64 %rd13, %rd2, %rd10;\nmov.b32 %r20, {addend};\n"
    ra, rb = (",".join(f"%r{start + i}" for i in range(len(x[0]))) for start, x in ((1, of_a), (5, of_b)))
    result, c = ",".join(f"%r{11 + i}" for i in range(of_d)), ",".join(["%r20"] * of_d)
    wide = "f32" if of_d == 4 else "f16"
    body += f"mma.sync.aligned.m16n8k{a.shape[1]}.row.col.{wide}.{kind}.{kind}.{wide} "
    body += f"{{{result}}}, {{{ra}}}, {{{rb}}}, {{{c}}};\nst.global.v{of_d}.b32 [%rd13], {{{result}}};"
    run(body, [*arrays, out])


def matrix(out):
    """D, of what the threads had: pairs of columns, of rows 8 apart."""
    found = np.zeros((16, 8))
    for lane in range(32):
        for r in range(4):
            found[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2] = out[lane, r]
    return found


@pytest.mark.parametrize(("k", "kind"), [(16, "f16"), (8, "f16"), (8, "tf32"), (4, "tf32"), (16, "bf16"), (8, "bf16")])
def test_products(k, kind):
    a, b = (representable(RNG.standard_normal(s).astype(np.float32), kind) for s in ((16, k), (k, 8)))
    multiply(a, b, kind, 4, f32(1), out := aligned(np.zeros((32, 4)), np.float32))
    exact = a.astype(np.float64) @ b + 1
    assert np.abs(matrix(out) - exact).max() <= k * 2**-24 * 16  # sums of fp32, of up to 16


@pytest.mark.parametrize("k", [8, 16])
def test_accumulators_of_16_bits(k):
    """Two elements of a row to a register; all numbers are small integers, hence exact."""
    a, b = (RNG.integers(-8, 8, shape).astype(np.float32) for shape in ((16, k), (k, 8)))
    multiply(a, b, "f16", 2, f16(1) | f16(2) << 16, out := aligned(np.zeros((32, 4)), np.float16))
    assert np.array_equal(matrix(out), a @ b + np.tile([1, 2], 4))
