"""The executor's floats: one rounding where there is one, ties, NaN, infinities and subnormal numbers."""

import operator
import random
from fractions import Fraction

import pytest

from tests.compiled.hand_written import as_f32, elementwise, f16, f32

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


def fused(a: list[int], b: list[int], c: list[int]) -> tuple[list[int], list[int]]:
    """What fma gives, and what it should."""
    exact = [Fraction(as_f32(x)) * Fraction(as_f32(y)) + Fraction(as_f32(z)) for x, y, z in zip(a, b, c, strict=True)]
    found = elementwise("fma.rn.f32 D, A, B, C;", [32] * 3, 32, a, b, c)
    return [x if x & 0x7FFFFFFF else 0 for x in found], [nearest(x) for x in exact]


def test_a_fused_product_and_sum_is_rounded_once():
    rng = random.Random(1)
    a = [f32(rng.choice([1, -1]) * rng.random() * 2.0 ** rng.randint(-40, 40)) for _ in range(200)]
    b = [f32(rng.choice([1, -1]) * rng.random() * 2.0 ** rng.randint(-20, 20)) for _ in a]
    c = [f32(-as_f32(x) * as_f32(y) * (1 + rng.choice([0, 1e-7, 1e-4, 1]))) for x, y in zip(a, b, strict=True)]
    found, expected = fused(a, b, c)
    assert found == expected


def test_a_fused_sum_just_beside_a_tie():
    """The sum in fp64 cannot tell it from the tie."""
    found, expected = fused([f32(1 + 2**-12)] * 2, [f32(2.0**-25 * (1 - 2**-12)), f32(2.0**-24)], [f32(1.0)] * 2)
    assert found == expected


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


def test_roundings_to_tf32_and_integers():
    tf32 = [0x3F800FFF, 0x3F801000, 0x3F803000, 0x3F801001, 0xBF801000]
    expected = [0x3F800000, 0x3F802000, 0x3F804000, 0x3F802000, 0xBF802000]
    assert elementwise("cvt.rna.tf32.f32 D, A;", [32], 32, tf32) == expected
    given = [*(f32(v) for v in (1.9, -1.9, 3e9, -3e9)), NAN]
    assert elementwise("cvt.rzi.s32.f32 D, A;", [32], 32, given) == [1, 2**32 - 1, 2**31 - 1, 2**31, 0]
    expected = [f32(16777216.0), f32(16777220.0), f32(-5.0)]
    assert elementwise("cvt.rn.f32.s32 D, A;", [32], 32, [16777217, 16777219, 2**32 - 5]) == expected


@pytest.mark.parametrize(("name", "pick"), [("max", max), ("min", min)])
def test_extremes_and_not_a_number(name, pick):
    found = elementwise(f"{name}.f32 D, A, B;", [32, 32], 32, X, Y)
    for got, v, w in zip(found, X, Y, strict=True):
        expected = w if is_nan(v) else v if is_nan(w) else f32(pick(as_f32(v), as_f32(w)))
        assert got == expected or is_nan(got) & is_nan(expected) or as_f32(got) == as_f32(expected) == 0
    found = elementwise(f"{name}.NaN.f32 D, A, B;", [32, 32], 32, X, Y)
    assert [is_nan(x) for x in found] == [is_nan(v) or is_nan(w) for v, w in zip(X, Y, strict=True)]


@pytest.mark.parametrize("suffix", ["", "u"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_and_not_a_number(name, suffix):
    found = elementwise(f"setp.{name}{suffix}.f32 %p1, A, B; selp.b32 D, 1, 0, %p1;", [32, 32], 32, X, Y)
    compare = getattr(operator, name)
    expected = [
        int(suffix == "u" if is_nan(v) or is_nan(w) else compare(as_f32(v), as_f32(w)))
        for v, w in zip(X, Y, strict=True)
    ]
    assert found == expected


def test_subnormal_numbers_are_flushed_by_ftz_instructions():
    given = [f32(2.0**-100), 1], [f32(2.0**-40), f32(1.0)]
    assert elementwise("mul.ftz.f32 D, A, B;", [32, 32], 32, *given) == [0, 0]
    assert elementwise("mul.f32 D, A, B;", [32, 32], 32, *given) == [512, 1]
