"""The executor's integers against Python's, for numbers at the edges and random ones."""

import random

import pytest

from tests.compiled.hand_written import elementwise, signed

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
    "mul.hi.u": lambda x, y, w: x * y >> w,
    "mul.hi.s": lambda x, y, w: signed(x, w) * signed(y, w) >> w,
    "and.b": lambda x, y, w: x & y,
    "or.b": lambda x, y, w: x | y,
    "xor.b": lambda x, y, w: x ^ y,
    "min.s": lambda x, y, w: min(signed(x, w), signed(y, w)),
    "max.u": lambda x, y, w: max(x, y),
    "min.relu.s": lambda x, y, w: max(min(signed(x, w), signed(y, w)), 0),
}
DIVISIONS = {
    "div.s": lambda x, y, w: quotient(signed(x, w), signed(y, w)),
    "rem.s": lambda x, y, w: signed(x, w) - quotient(signed(x, w), signed(y, w)) * signed(y, w),
    "div.u": lambda x, y, w: x // y,
    "rem.u": lambda x, y, w: x % y,
}
SHIFTS = {
    "shl.b": lambda x, n, w: x << n if n < w else 0,
    "shr.u": lambda x, n, w: x >> n if n < w else 0,
    "shr.s": lambda x, n, w: signed(x, w) >> min(n, w - 1),
}


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", [*TWO, *DIVISIONS])
def test_two_operands(name, width):
    a, b = numbers(width), numbers(width)
    if name in DIVISIONS:
        b = [x or 3 for x in b]
    expected = [(TWO | DIVISIONS)[name](x, y, width) % 2**width for x, y in zip(a, b, strict=True)]
    assert elementwise(f"{name}{width} D, A, B;", [width, width], width, a, b) == expected


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_are_clamped(name, width):
    a = numbers(width)
    amounts = [RNG.choice([0, 1, 5, width - 1, width, width + 1, 200]) for _ in a]
    expected = [SHIFTS[name](x, n, width) % 2**width for x, n in zip(a, amounts, strict=True)]
    assert elementwise(f"{name}{width} D, A, B;", [width, 32], width, a, amounts) == expected


@pytest.mark.parametrize("width", [32, 64])
def test_three_operands_and_counts(width):
    a, b, c = (numbers(width) for _ in range(3))
    expected = [(x * y + z) % 2**width for x, y, z in zip(a, b, c, strict=True)]
    assert elementwise(f"mad.lo.s{width} D, A, B, C;", [width] * 3, width, a, b, c) == expected
    expected = [(y & ~(511 << 5)) | (x & 511) << 5 for x, y in zip(a, b, strict=True)]
    assert elementwise(f"bfi.b{width} D, A, B, 5, 9;", [width] * 2, width, a, b) == expected
    assert elementwise(f"popc.b{width} D, A;", [width], 32, a) == [x.bit_count() for x in a]
    assert elementwise(f"clz.b{width} D, A;", [width], 32, a) == [width - x.bit_length() for x in a]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(("position", "length"), [(0, 5), (4, 14), (31, 1), (20, 12), (3, 0)])
@pytest.mark.parametrize("sign", "us")
def test_bit_fields(sign, position, length, width):
    a = numbers(width)
    expected = [(x >> position) & ((1 << length) - 1) for x in a]
    if sign == "s" and length:
        expected = [signed(x, length) % 2**width for x in expected]
    assert elementwise(f"bfe.{sign}{width} D, A, {position}, {length};", [width], width, a) == expected


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x0123, 0x8F19])
def test_bytes_are_chosen(selector):
    a, b = numbers(32), numbers(32)
    expected = []
    for x, y in zip(a, b, strict=True):
        picks = [selector >> 4 * i & 15 for i in range(4)]
        found = [(x | y << 32) >> 8 * (n & 7) & 255 for n in picks]
        found = [255 * (byte >> 7) if n & 8 else byte for n, byte in zip(picks, found, strict=True)]
        expected.append(sum(byte << 8 * i for i, byte in enumerate(found)))
    assert elementwise(f"prmt.b32 D, A, B, {selector};", [32, 32], 32, a, b) == expected


def test_wide_products_funnels_tables_and_extensions():
    a, b = numbers(32), numbers(32)
    c, pairs = a[::-1], list(zip(a, b, strict=True))
    expected = [signed(x, 32) * signed(y, 32) % 2**64 for x, y in pairs]
    assert elementwise("mul.wide.s32 D, A, B;", [32, 32], 64, a, b) == expected
    expected = [((y << 32 | x) << 5 >> 32) % 2**32 for x, y in pairs]
    assert elementwise("shf.l.wrap.b32 D, A, B, 37;", [32, 32], 32, a, b) == expected
    assert elementwise("shf.r.clamp.b32 D, A, B, 32;", [32, 32], 32, a, b) == b
    expected = [x & y | y & z | x & z for x, y, z in zip(a, b, c, strict=True)]
    assert elementwise("lop3.b32 D, A, B, C, 0xE8;", [32] * 3, 32, a, b, c) == expected
    assert elementwise("cvt.s64.s32 D, A;", [32], 64, a) == [signed(x, 32) % 2**64 for x in a]
    assert elementwise("cvt.u64.u32 D, A;", [32], 64, a) == a
    assert elementwise("cvt.s32.s8 D, A;", [32], 32, a) == [signed(x, 8) % 2**32 for x in a]
