"""Packed weights: products with every number of rows, bias, part and form of input; models that have them.

Letters: D outputs, K inputs of a map, M rows.
"""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from fastformer.functional import linear_cross_entropy
from fastformer.nn import fast_path, pack_weights
from fastformer.nn.fast_path import PackedWeight

EPS32 = 2.0**-24

needs_blocks = pytest.mark.skipif(not fast_path._BLOCKS, reason="this PyTorch has no products with blocks")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights of a few numbers like large ones."""
    monkeypatch.setattr(fast_path, "_MIN_PACKED_SIZE", 1)


def packed(values: Tensor) -> PackedWeight:
    linear = nn.Linear(values.shape[1], values.shape[0], bias=False)
    linear.weight = nn.Parameter(values.clone())
    pack_weights(linear)
    assert isinstance(linear.weight, PackedWeight)
    return linear.weight


def check(found: Tensor, x: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
    """Compare a product with the formula in fp64; sums of K products are rounded K + 2 times at most."""
    x, values = x.double(), values.double()
    expected = x @ values.t() + (0.0 if bias is None else bias.double())
    size = x.abs() @ values.abs().t() + (0.0 if bias is None else bias.double().abs())
    assert found.shape == expected.shape
    assert bool(((found - expected).abs() <= (x.shape[-1] + 2) * EPS32 * size + EPS32).all())


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize(("D", "K"), [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4, 5, 33), (5, 1), (1, 5)], ids=str)
def test_every_number_of_rows_after_any_other(D: int, K: int, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values, bias = torch.randn(D, K), torch.randn(D)
    weight = packed(values)
    for M in rows:
        x = torch.randn(M, K)
        for given in (x, x[:, None], x[None], x[:, None].expand(M, 2, K)):
            check(F.linear(given, weight, bias), given, values, bias)
            check(F.linear(given, weight[1:3], bias[1:3]), given, values[1:3], bias[1:3])
    assert weight.copies[None].layout is torch._mkldnn  # type: ignore[attr-defined]


@needs_blocks
@torch.no_grad()
def test_parts_are_rows_of_the_whole() -> None:
    values, x = torch.randn(12, 16), torch.randn(5, 16)
    weight = packed(values)
    q, k = weight.split_with_sizes([4, 8])
    check(F.linear(x, q), x, values[:4])
    check(F.linear(x, k), x, values[4:])
    assert weight[4:] is k  # packed once
    for first in range(12):
        check(F.linear(x, weight[first:]), x, values[first:])
    assert len(weight.copies) <= fast_path._MAX_SLICES + 1


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize("M", [1, 2, 5])
@pytest.mark.parametrize(("D", "K"), [(6, 4), (4, 6)])
def test_every_bias_that_broadcasts(M: int, D: int, K: int) -> None:
    """oneDNN reads D numbers side by side, wherever those of the bias are: beyond its memory, too."""
    values, x = torch.randn(D, K), torch.randn(M, K)
    weight = packed(values)
    for bias in (torch.randn(2 * D)[::2], torch.randn(1).expand(D), torch.randn(1), torch.randn(()), torch.randn(M, D)):
        check(F.linear(x, weight, bias), x, values, bias)


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("M", [2, 5])
def test_nan_and_inf_stay_in_their_row(value: float, M: int) -> None:
    values, x = torch.randn(6, 9), torch.randn(M, 9)
    x[1, 3] = value
    found = F.linear(x, packed(values))
    assert not found[1].isfinite().any()
    check(found[0], x[0], values)


@needs_blocks
def test_other_operations_see_an_ordinary_parameter() -> None:
    """Gradients, transforms, autocast, other dtypes and inputs of one dimension: as without blocks."""
    torch.manual_seed(0)
    values, x = torch.randn(6, 4), torch.randn(5, 4)
    weight, plain = packed(values), nn.Parameter(values.clone())
    for parameter in (weight, plain):
        loss = (
            F.linear(x, parameter).square().sum() + parameter[1:3].sum() + parameter.split_with_sizes([2, 4])[1].sum()
        )
        loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, plain.grad)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(lambda row: F.linear(row, weight))(x), F.linear(x, plain))
        torch.testing.assert_close(F.linear(x[0], weight), F.linear(x[0], plain))
        losses = (linear_cross_entropy(x, w, torch.arange(5), label_smoothing=0.1) for w in (weight, plain))
        torch.testing.assert_close(*losses)
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            F.linear(x.double(), weight)


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize("change", ["copy_", "data", "state dict"])
def test_a_changed_weight_is_packed_anew(change: str) -> None:
    linear, x, new = nn.Linear(6, 6, bias=False), torch.randn(5, 6), torch.randn(6, 6)
    pack_weights(linear)
    linear(x), linear.weight[2:], F.linear(x, linear.weight[2:])
    if change == "copy_":
        linear.weight.copy_(new)
    elif change == "data":
        linear.weight.data = new
    else:
        linear.load_state_dict({"weight": new})
    check(linear(x), x, new)
    check(F.linear(x, linear.weight[2:]), x, new[2:])


@torch.no_grad()
@pytest.mark.parametrize("few", [True, False])
def test_without_blocks_weights_are_parameters_by_columns(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """Where a weight is small, and where there is no oneDNN; an embedding that shares it keeps its rows."""
    monkeypatch.setattr(fast_path, *(("_MIN_PACKED_SIZE", 1 << 18) if few else ("_BLOCKS", False)))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    before = model[1](model[0](torch.tensor([1, 2])))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    pack_weights(model)
    assert [type(x) is nn.Parameter for x in model.parameters()] == [True] * 5
    assert [module.weight.stride() for module in model] == [(4, 1), (1, 5), (1, 5)]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(model[1](model[0](torch.tensor([1, 2]))), before)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def test_modules_that_pack_weights_leaves_alone() -> None:
    """A subclass; a parametrised layer; norms, embeddings, torch's attention; other dtypes; what is packed already."""
    parametrised = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    others = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, device="meta"), nn.MultiheadAttention(4, 2)
    model = nn.Sequential(Doubled(3, 3), parametrised, nn.LayerNorm(3), nn.Embedding(3, 3), *others, nn.Linear(3, 3))
    before = dict(model.named_parameters())
    pack_weights(model)
    changed = {name for name, x in model.named_parameters() if x is not before[name]}
    assert changed == {"7.weight"}
    weight = model[7].weight
    pack_weights(model)
    assert model[7].weight is weight


def test_a_packed_model_is_copied_saved_moved_and_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)).eval()
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 16)
    expected = model(x).detach()
    pack_weights(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), copy.deepcopy(model).double().float()):
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(model).double()(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    trained = fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True).eval()
    trained.load_state_dict(model[0].state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained(x))
        assert not torch.allclose(model(x), expected)
