"""Products with packed weights: what they may be off by, for every number of rows, bias and part, watched or not.

Letters: D outputs, K inputs of a map, M rows.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn import inference_weights, pack_weights
from fastformer.nn.inference_weights import PRECISIONS, PackedWeight

EPS32, EPS16 = 2.0**-24, 2.0**-8
SEVEN_BITS = 127  # steps between the smallest and the largest number of the other factor, 0 among them


def packed(weight: Tensor, precision: str) -> PackedWeight:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.clone())
    pack_weights(linear, precision)
    if not isinstance(linear.weight, PackedWeight):
        assert precision == "fp32"
        assert not inference_weights._has_blocks(weight)
        return inference_weights._Float32.of(weight)
    return linear.weight


def tolerance(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """What each output `[M, D]` may be off by, in fp64."""
    x, weight = x.double(), weight.double()
    size = x.abs() @ weight.abs().t()
    sums = (x.shape[-1] + 2) * EPS32 * size
    if precision == "fp32":
        return sums
    if precision == "bf16":
        return sums + (3 * EPS16 + 4 * EPS16**2) * size  # both factors, and the result
    half = 0.5 * weight.abs().amax(1) / 127  # of a step of each row of the weight
    # The range is stretched so that 0 is one of its steps, by half a step at either end.
    step = (x.max().clamp_min(0) - x.min().clamp_max(0)) / SEVEN_BITS
    return sums + x.abs().sum(-1, keepdim=True) * half + step * (weight.abs().sum(1) + x.shape[-1] * half)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("M", [1, 2, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_products(precision: str, M: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x, b = torch.randn(48, 40) * torch.rand(48, 1), torch.randn(M, 40), torch.randn(48)
    weight[3], weight[4, 1:] = 0.0, 0.0
    found = F.linear(x, packed(weight, precision), b if bias else None)
    expected = x.double() @ weight.double().t() + (b.double() if bias else 0.0)
    allowed = tolerance(x, weight, precision) + EPS32 * expected.abs()
    assert bool(((found - expected).abs() <= allowed).all())
    rounded = not torch.equal(found, F.linear(x, weight, b if bias else None))
    assert rounded or precision == "fp32"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parts_are_rows_of_the_whole(precision: str) -> None:
    torch.manual_seed(0)
    weight, x = packed(torch.randn(12, 16), precision), torch.randn(3, 16)
    whole = F.linear(x, weight)
    q, k = weight.split_with_sizes([4, 8])
    torch.testing.assert_close(torch.cat([F.linear(x, part) for part in (q, k)], -1), whole)
    torch.testing.assert_close(F.linear(x, weight[4:]), whole[:, 4:])
    assert weight[4:] is k  # packed once
    assert (weight.shape, weight.dtype, weight.device.type) == ((12, 16), torch.float32, "cpu")
    assert F.linear(x[:0], weight).shape == (0, 12)
    assert F.linear(x.view(3, 1, 16).expand(3, 2, 16), weight).shape == (3, 2, 12)


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("K", [1, 3, 9, 16, 33])
def test_what_is_no_number_stays_none_in_its_row_alone(precision: str, value: float, K: int) -> None:
    """Wherever it stands: kernels look for a range by several numbers at once."""
    torch.manual_seed(0)
    weight = torch.randn(5, K)
    for at in range(K):
        x = torch.randn(3, K)
        x[1, at] = value
        found = F.linear(x, packed(weight, precision))
        assert not found[1].isfinite().any()
        others = x[[0, 2]]
        assert bool(((found[[0, 2]] - others @ weight.t()).abs() <= tolerance(others, weight, precision)).all())
        apart = torch.func.vmap(packed(weight, precision).linear, (0, None))(x, None)
        assert not apart[1].isfinite().any()


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_of_every_form(precision: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    pack_weights(linear, precision)
    x = torch.randn(16)
    torch.testing.assert_close(linear(x), linear(x[None])[0])
    large = torch.full((2, 16), 3e38)  # whose sum is not finite
    assert bool(F.linear(large, packed(torch.eye(16), precision)).isfinite().all())
    with torch.autocast("cpu", torch.bfloat16):  # of whose products inputs may be
        torch.testing.assert_close(linear(x[None].bfloat16()), linear(x[None].bfloat16().float()))
    for wrong in (x[:15], x.double(), x.bfloat16(), torch.zeros(2, 16, dtype=torch.int64), x.to("meta"), x[0]):
        with pytest.raises(RuntimeError, match=r"take fp32 \[\.\.\., 16\] on the CPU, not torch\."):
            linear(wrong)
    with torch.device("meta"):
        pack_weights(nn.Linear(3, 2, device="cpu"), precision)
    empty = nn.Linear(1, 3)
    empty.weight = nn.Parameter(torch.empty(3, 0))
    pack_weights(empty, precision)
    assert torch.equal(empty(torch.empty(2, 0)), empty.bias.expand(2, 3))


@torch.no_grad()
@pytest.mark.parametrize(("D", "K"), [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4, 5), (5, 1), (1, 5), (4, 0, 1)], ids=str)
@pytest.mark.parametrize("blocks", [True, False])
def test_every_number_of_rows_after_any_other_in_fp32(
    monkeypatch: pytest.MonkeyPatch, D: int, K: int, rows: tuple[int, ...], blocks: bool
) -> None:
    """By columns is made of blocks, and parts of either."""
    monkeypatch.setattr(inference_weights, "_BLOCKS", blocks and inference_weights._BLOCKS)
    torch.manual_seed(0)
    values, bias = torch.randn(D, K), torch.randn(D)
    weight = packed(values, "fp32")
    assert isinstance(weight, inference_weights._Float32)
    for M in rows:
        x = torch.randn(M, K)
        allowed = tolerance(x, values, "fp32") + EPS32 * (bias.abs() + 1)
        expected = x.double() @ values.double().t() + bias.double()
        for given in (x, x[:, None], x[None]):
            found = F.linear(given, weight, bias)
            assert found.shape == (*given.shape[:-1], D)
            assert bool(((found.view(M, D) - expected).abs() <= allowed).all())
        part = weight.cut(1, 3)
        assert bool(((F.linear(x, part, bias[1:3]) - expected[:, 1:3]).abs() <= allowed[:, 1:3]).all())
    assert (weight.blocks is not None) == (blocks and inference_weights._BLOCKS)


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("M", [1, 2, 5])
@pytest.mark.parametrize(("D", "K"), [(6, 4), (4, 6)])
def test_every_bias_that_broadcasts(precision: str, M: int, D: int, K: int) -> None:
    """oneDNN's products read D numbers side by side, wherever those of the bias were: beyond its memory, too."""
    torch.manual_seed(0)
    values, x = torch.randn(D, K), torch.randn(M, K)
    weight = packed(values, precision)
    allowed = tolerance(x, values, precision) + EPS32 * 8
    for bias in (
        torch.randn(2 * D)[::2],
        torch.randn(1).expand(D),
        torch.randn(1),
        torch.randn(()),
        torch.randn(1, D),
        torch.randn(M, 1),
        torch.randn(M, D),
    ):
        expected = x.double() @ values.double().t() + bias.double()
        assert bool(((F.linear(x, weight, bias) - expected).abs() <= allowed).all())


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("M", [1, 5])
def test_autocast_rounds_no_products(precision: str, M: int) -> None:
    torch.manual_seed(0)
    weight, x = packed(torch.randn(8, 4), precision), torch.randn(M, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = F.linear(x, weight)
    assert found.dtype == torch.float32
    assert torch.equal(found, F.linear(x, weight))


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_packed_changes_no_more(precision: str) -> None:
    """With the tensor that was given: forms are made when first needed, so that some would have changed with it."""
    linear = nn.Linear(4, 8)
    given, x = linear.weight.data, torch.randn(5, 4)
    pack_weights(linear, precision)
    other = packed(given, precision)
    part = linear.weight[:3]
    given.zero_()
    assert torch.equal(F.linear(x, linear.weight), F.linear(x, other))
    assert torch.equal(F.linear(x, part), F.linear(x, other[:3]))
