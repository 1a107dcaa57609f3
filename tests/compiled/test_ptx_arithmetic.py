"""The executor's arithmetic: integers against Python's, floats with one rounding where there is one, ties and NaN."""

import operator
import random
from fractions import Fraction

import pytest

from tests.compiled.hand_written import as_f32, elementwise, f16, f32, signed

RNG = random.Random(0)


def numbers(width: int, count: int = 160) -> list[int]:
    top = 1 << width
    edges = [0, 1, 2, 3, 7, 31, 32, 33, top - 1, top // 2, top // 2 - 1, top // 2 + 1, 0x12345678]
    return [RNG.choice(edges) if RNG.random() < 0.5 else RNG.randrange(top) for _ in range(count)]


def quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


# By what is between the opcode's name and the width: a function of (x, y, w), of which only the last w bits count.
TWO = {
    "add.s": lambda x, y, w: x + y,
    "sub.s": lambda x, y, w: x - y,
    "mul.lo.s": lambda x, y, w: x * y,
    "and.b": lambda x, y, w: x & y,
    "or.b": lambda x, y, w: x | y,
    "xor.b": lambda x, y, w: x ^ y,
    "min.s": lambda x, y, w: min(signed(x, w), signed(y, w)),
    "max.u": lambda x, y, w: max(x, y),
    "min.relu.s": lambda x, y, w: max(min(signed(x, w), signed(y, w)), 0),
    "div.s": lambda x, y, w: quotient(signed(x, w), signed(y, w)),
    "shl.b": lambda x, n, w: x << n if n < w else 0,
    "shr.u": lambda x, n, w: x >> n if n < w else 0,
    "shr.s": lambda x, n, w: signed(x, w) >> min(n, w - 1),
}


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", TWO)
def test_two_operands(name, width):
    """Amounts of shifts have 32 bits, and no more than the width counts."""
    a, b, of_b = numbers(width), numbers(width), width
    if name[:3] == "div":
        b = [x or 3 for x in b]
    if name[:2] == "sh":
        b, of_b = [RNG.choice([0, 1, 5, width - 1, width, width + 1, 200]) for _ in a], 32
    expected = [TWO[name](x, y, width) % 2**width for x, y in zip(a, b, strict=True)]
    assert elementwise(f"{name}{width} D, A, B;", [width, of_b], width, a, b) == expected


@pytest.mark.parametrize(("position", "length"), [(0, 5), (4, 14), (31, 1), (20, 12), (3, 0)])
def test_bit_fields(position, length):
    a = numbers(32)
    expected = [(x >> position) & ((1 << length) - 1) for x in a]
    assert elementwise(f"bfe.u32 D, A, {position}, {length};", [32], 32, a) == expected
    expected = [signed(x, length) % 2**32 if length else 0 for x in expected]
    assert elementwise(f"bfe.s32 D, A, {position}, {length};", [32], 32, a) == expected


@pytest.mark.parametrize("selector", [0x5410, 0x7701, 0x0123, 0x8F19])
def test_bytes_are_chosen(selector):
    a, b = numbers(32), numbers(32)
    expected = []
    for x, y in zip(a, b, strict=True):
        picks = [selector >> 4 * i & 15 for i in range(4)]
        actual = [(x | y << 32) >> 8 * (n & 7) & 255 for n in picks]
        actual = [255 * (byte >> 7) if n & 8 else byte for n, byte in zip(picks, actual, strict=True)]
        expected.append(sum(byte << 8 * i for i, byte in enumerate(actual)))
    assert elementwise(f"prmt.b32 D, A, B, {selector};", [32, 32], 32, a, b) == expected


def test_products_and_conversions_of_two_widths():
    a, b, c = numbers(32), numbers(32), numbers(64)
    pairs = list(zip(a, b, strict=True))
    assert elementwise("mul.hi.u32 D, A, B;", [32, 32], 32, a, b) == [x * y >> 32 for x, y in pairs]
    expected = [signed(x, 32) * signed(y, 32) % 2**64 for x, y in pairs]
    assert elementwise("mul.wide.s32 D, A, B;", [32, 32], 64, a, b) == expected
    expected = [(x * y + z) % 2**64 for (x, y), z in zip(pairs, c, strict=True)]
    assert elementwise("mad.wide.u32 D, A, B, C;", [32, 32, 64], 64, a, b, c) == expected
    assert elementwise("cvt.s64.s32 D, A;", [32], 64, a) == [signed(x, 32) % 2**64 for x in a]
    assert elementwise("cvt.u64.u32 D, A;", [32], 64, a) == a
    assert elementwise("cvt.s32.s8 D, A;", [32], 32, a) == [signed(x, 8) % 2**32 for x in a]
    expected = [f32(16777216.0), f32(16777220.0), f32(-5.0)]
    assert elementwise("cvt.rn.f32.s32 D, A;", [32], 32, [16777217, 16777219, 2**32 - 5]) == expected


# ---- floats

NAN, INF, LARGEST = 0x7FC00000, 0x7F800000, 0x7F7FFFFF
SPECIAL = [NAN, INF, 0xFF800000, 0, 0x80000000, 1, LARGEST, f32(1.0), f32(-2.5), 0x3F808000, 0x3F818000, 0x3F808001]
X, Y = SPECIAL * len(SPECIAL), [v for v in SPECIAL for _ in SPECIAL]


def nearest(x: Fraction) -> int:
    """The bits of the nearest fp32, ties to even."""
    if x == 0:
        return 0
    e = 0
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    while abs(x) < Fraction(2) ** e:
        e -= 1
    unit = Fraction(2) ** (max(e, -126) - 23)
    return f32(float(Fraction(round(x / unit)) * unit))


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INF


def test_a_fused_product_and_sum_is_rounded_once():
    """Sums that cancel, and one just beside a tie, which a sum in fp64 cannot tell from it."""
    rng = random.Random(1)
    a = [f32(rng.choice([1, -1]) * rng.random() * 2.0 ** rng.randint(-40, 40)) for _ in range(200)]
    b = [f32(rng.choice([1, -1]) * rng.random() * 2.0 ** rng.randint(-20, 20)) for _ in a]
    c = [f32(-as_f32(x) * as_f32(y) * (1 + rng.choice([0, 1e-7, 1e-4, 1]))) for x, y in zip(a, b, strict=True)]
    a, b, c = [*a, *[f32(1 + 2**-12)] * 2], [*b, f32(2.0**-25 * (1 - 2**-12)), f32(2.0**-24)], [*c, *[f32(1.0)] * 2]
    exact = [Fraction(as_f32(x)) * Fraction(as_f32(y)) + Fraction(as_f32(z)) for x, y, z in zip(a, b, c, strict=True)]
    actual = elementwise("fma.rn.f32 D, A, B, C;", [32] * 3, 32, a, b, c)
    assert [x if x & 0x7FFFFFFF else 0 for x in actual] == [nearest(x) for x in exact]


def rounded_bf16(bits: int) -> int:
    return 0x7FFF if is_nan(bits) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def test_roundings_to_16_bits():
    assert elementwise("cvt.rn.bf16.f32 D, A;", [32], 16, SPECIAL) == [rounded_bf16(v) for v in SPECIAL]
    expected = [rounded_bf16(v) << 16 | rounded_bf16(w) for v, w in zip(X, Y, strict=True)]
    assert elementwise("cvt.rn.bf16x2.f32 D, A, B;", [32, 32], 32, X, Y) == expected
    edges = [1.0, 65504.0, 65519.9, 1 + 2**-11, 1 + 3 * 2**-11, 2.0**-25, 2.0**-24, 3e-8, -0.1]
    assert elementwise("cvt.rn.f16.f32 D, A;", [32], 16, [f32(v) for v in edges]) == [
        f16(as_f32(f32(v))) for v in edges
    ]
    assert elementwise("cvt.rn.f16.f32 D, A;", [32], 16, [f32(65520.0)]) == [0x7C00]


def test_rounding_to_tf32():
    """To 10 bits, halves away from zero."""
    steps = [2.0**-10, 2.0**-11, 2.0**-11 - 2.0**-23, 3 * 2.0**-11]
    rounded = [2.0**-10, 2.0**-10, 0.0, 2.0**-9]
    given, expected = ([f32(sign * (1 + x)) for sign in (1, -1) for x in values] for values in (steps, rounded))
    assert elementwise("cvt.rna.tf32.f32 D, A;", [32], 32, given) == expected
    assert elementwise("cvt.rna.tf32.f32 D, A;", [32], 32, [INF, INF | 1 << 31]) == [INF, INF | 1 << 31]


@pytest.mark.parametrize(("name", "pick"), [("max", max), ("min", min)])
def test_extremes_and_not_a_number(name, pick):
    actual = elementwise(f"{name}.f32 D, A, B;", [32, 32], 32, X, Y)
    for got, v, w in zip(actual, X, Y, strict=True):
        expected = w if is_nan(v) else v if is_nan(w) else f32(pick(as_f32(v), as_f32(w)))
        assert got == expected or is_nan(got) & is_nan(expected) or as_f32(got) == as_f32(expected) == 0


@pytest.mark.parametrize("suffix", ["", "u"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_and_not_a_number(name, suffix):
    actual = elementwise(f"setp.{name}{suffix}.f32 %p1, A, B; selp.b32 D, 1, 0, %p1;", [32, 32], 32, X, Y)
    compare = getattr(operator, name)
    expected = [
        int(suffix == "u" if is_nan(v) or is_nan(w) else compare(as_f32(v), as_f32(w)))
        for v, w in zip(X, Y, strict=True)
    ]
    assert actual == expected


def test_comparisons_for_not_a_number():
    actual = elementwise("setp.num.f32 %p1, A, B; selp.b32 D, 1, 0, %p1;", [32, 32], 32, X, Y)
    assert actual == [int(not (is_nan(v) or is_nan(w))) for v, w in zip(X, Y, strict=True)]


def test_subnormal_numbers_are_flushed_by_ftz_instructions():
    given = [f32(2.0**-100), 1], [f32(2.0**-40), f32(1.0)]
    assert elementwise("mul.ftz.f32 D, A, B;", [32, 32], 32, *given) == [0, 0]
    assert elementwise("mul.f32 D, A, B;", [32, 32], 32, *given) == [512, 1]
