"""Rotary tables and biases by distance, against what the papers write, number by number."""

import math

import pytest
import torch

from fastformer.nn import ALiBi, Llama3Scaling, RelativeBias, Rotary


def test_the_tables_of_the_paper():
    cos, sin = Rotary(theta=100.0).tables(6, 5, torch.zeros(1, dtype=torch.float64))
    assert cos.dtype == torch.float64
    assert cos.shape == sin.shape
    assert cos.shape[0] >= 5
    for position in range(5):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert float(cos[position, i]) == pytest.approx(math.cos(angle), abs=1e-14)
            assert float(sin[position, i]) == pytest.approx(math.sin(angle), abs=1e-14)
    assert Rotary().tables(6, 5, torch.zeros(1, dtype=torch.bfloat16))[0].dtype == torch.float32


def test_far_positions_are_rounded_once():
    position = 100_000  # in fp32, position * frequency is off by up to 4e-3 here
    cos, _ = Rotary().tables(8, position + 1, torch.zeros(1))
    for i in range(4):
        exact = math.cos(position * 10_000.0 ** (-2 * i / 8))
        assert abs(float(cos[position, i]) - exact) <= 2**-24


def test_a_share_and_a_scale():
    like = torch.zeros(1, dtype=torch.float64)
    cos, _ = Rotary(share=0.5, scaling=4.0).tables(8, 9, like)
    plain, _ = Rotary().tables(4, 9, like)
    assert cos.shape[1] == 2
    torch.testing.assert_close(cos[8], plain[2], rtol=0, atol=1e-14)


def test_llama_slows_slow_frequencies_alone():
    scaling = Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=64)
    wavelengths = [2.0, 16.0, 32.0, 64.0, 1000.0]  # of 64 positions: 32, 4, 2, 1 and 0.064 turns
    given = torch.tensor([2 * math.pi / x for x in wavelengths], dtype=torch.float64)
    expected = [1.0, 1.0, (1 - 1 / 3) / 8 + 1 / 3, 1 / 8, 1 / 8]
    torch.testing.assert_close(scaling.scale(given) / given, torch.tensor(expected, dtype=torch.float64))


WRONG = [
    (Rotary, {"theta": float("nan")}, "theta must be a finite number"),
    (Rotary, {"share": 1.5}, "share must be above 0 and at most 1"),
    (Rotary, {"interleaved": 1}, "interleaved must be true or false"),
    (Rotary, {"scaling": 1e-300}, "theta and scaling must leave angles finite"),
    (Llama3Scaling, {"original": 10**400}, "original must be at least 1 and at most"),
    (Llama3Scaling, {"low": 4.0, "high": 1.0}, "high must be above low"),
    (RelativeBias, {"heads": 0}, "heads must be at least 1"),
    (RelativeBias, {"heads": 2, "buckets": 7}, "buckets must be even where bidirectional, not 7"),
    (RelativeBias, {"heads": 2, "max_distance": 8}, "max_distance must be above 8"),
]


def test_wrong_settings_are_refused_by_name():
    for made, settings, message in WRONG:
        with pytest.raises(ValueError, match=message):
            made(**settings)


def test_alibi_of_the_paper():
    bias = ALiBi(8)(4)
    assert bias.shape == (8, 7)
    for head in range(8):
        for column, distance in enumerate(range(-3, 4)):
            assert float(bias[head, column]) == pytest.approx(-(2.0 ** -(head + 1)) * abs(distance))
    # The paper's code for other numbers: those of 8 heads, then every other one of 16.
    slopes = (-ALiBi(12)(2)[:, 0]).tolist()
    assert slopes == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_counts_beyond_what_a_narrow_dtype_can(dtype):
    length = 70_000  # bf16 has no 257, fp16 nothing above 65,504
    bias = ALiBi(4).to(dtype)(length)
    assert torch.equal(bias, ALiBi(4)(length))


def bucket(distance: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """Section 2.1 of Raffel et al. 2020, for one distance of a key from its query."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
    return first + min(exact + int(steps + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 6), (16, 1000)])
def test_buckets_of_the_paper(bidirectional, buckets, furthest):
    bias = RelativeBias(3, buckets, furthest, bidirectional)
    length = 300
    expected = [bucket(d, buckets, furthest, bidirectional) for d in range(1 - length, length)]
    found = bias.bucket(torch.arange(1 - length, length)).tolist()
    # Where a logarithm is a whole number, fp32 may say the bucket before.
    off = [(a, b) for a, b in zip(found, expected, strict=True) if a != b]
    assert all(b - a == 1 for a, b in off)
    assert len(off) <= 4
    out = bias(length)
    assert out.shape == (3, 2 * length - 1)
    assert torch.equal(out[1], bias.weight[found, 1])
    out.sum().backward()
    counts = torch.bincount(torch.tensor(found), minlength=buckets).float()
    assert torch.equal(bias.weight.grad, counts[:, None].expand(-1, 3))
