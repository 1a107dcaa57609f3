"""Packed weights: products with them are those of the formula, and a packed model is used like any other."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from fastformer.functional import linear_cross_entropy
from fastformer.nn import pack_weights, packed_weights
from fastformer.nn.packed_weights import PackedWeight

EPS32 = 2.0**-24
needs_blocks = pytest.mark.skipif(not packed_weights._HAS_BLOCKS, reason="this PyTorch has no products with blocks")


@pytest.fixture
def packs_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "_MIN_PACKED_SIZE", 1)
    monkeypatch.setattr(packed_weights, "_IS_INTEL", False)


def packed(values: Tensor) -> PackedWeight:
    linear = nn.Linear(values.shape[1], values.shape[0], bias=False)
    linear.weight = nn.Parameter(values.clone())
    pack_weights(linear)
    assert isinstance(linear.weight, PackedWeight)
    return linear.weight


def assert_product(actual: Tensor, x: Tensor, values: Tensor, bias: Tensor | None = None) -> None:
    """Compare a product with the formula in fp64; sums of K products are rounded K + 2 times at most."""
    x, values, added = x.double(), values.double(), torch.zeros(()) if bias is None else bias.double()
    expected, magnitude = x @ values.t() + added, x.abs() @ values.abs().t() + added.abs()
    assert actual.shape == expected.shape
    assert bool(((actual - expected).abs() <= (x.shape[-1] + 2) * EPS32 * magnitude + EPS32).all())


@needs_blocks
@torch.no_grad()
@pytest.mark.usefixtures("packs_small_weights")
@pytest.mark.parametrize(("D", "K"), [(6, 4), (4, 6)])
def test_packed_weights_take_every_number_of_rows_and_every_bias(D: int, K: int) -> None:
    """oneDNN reads D consecutive numbers of a bias, whatever its strides are."""
    values, bias = torch.randn(D, K), torch.randn(D)
    weight = packed(values)
    for M in (0, 1, 2, 3, 4, 5, 33, 1, 5):
        x = torch.randn(M, K)
        for inputs in (x, x[:, None], x[None], x[:, None].expand(M, 2, K)):
            assert_product(F.linear(inputs, weight, bias), inputs, values, bias)
            assert_product(F.linear(inputs, weight[1:3], bias[1:3]), inputs, values[1:3], bias[1:3])
        for other in (torch.randn(2 * D)[::2], torch.randn(1).expand(D), torch.randn(M, D), torch.randn(1)):
            assert_product(F.linear(x, weight, other), x, values, other)
    assert weight.copies[None].layout is torch._mkldnn  # type: ignore[attr-defined]


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize(("is_intel", "rows"), [(True, {6, 24}), (False, {2, 5, 6, 24, 25})])
def test_large_weights_are_stored_by_columns_and_in_blocks_for_rows_for_which_these_are_faster(
    is_intel: bool, rows: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_IS_INTEL", is_intel)
    monkeypatch.setattr(packed_weights, "_MIN_PACKED_SIZE", 1000)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(20, 8))
    values = [layer.weight.clone() for layer in model]
    pack_weights(model)
    assert [isinstance(layer.weight, PackedWeight) for layer in model] == [True, False]
    stored = list(model.parameters())
    pack_weights(model)
    assert all(a is b for a, b in zip(stored, model.parameters(), strict=True)), "an optimizer would lose them"
    for M in (1, 2, 5, 6, 24, 25):
        x = torch.randn(M, 20)
        for layer, expected in zip(model, values, strict=True):
            assert layer.weight.t().is_contiguous()
            assert_product(F.linear(x, layer.weight, layer.bias), x, expected, layer.bias)
        attributes = model[0].weight.__dict__
        assert (None in attributes.pop("copies", {})) == (M in rows)
        attributes.pop("state", None)


@needs_blocks
@torch.no_grad()
@pytest.mark.usefixtures("packs_small_weights")
@pytest.mark.parametrize("M", [2, 5])
def test_nan_and_inf_stay_in_their_row(M: int) -> None:
    for value in (math.nan, math.inf):
        values, x = torch.randn(6, 9), torch.randn(M, 9)
        x[1, 3] = value
        out = F.linear(x, packed(values))
        assert not out[1].isfinite().any()
        assert_product(out[0], x[0], values)


@needs_blocks
@pytest.mark.usefixtures("packs_small_weights")
def test_other_operations_use_a_packed_weight_as_an_ordinary_parameter() -> None:
    values, x = torch.randn(6, 4), torch.randn(5, 4)
    weight, plain = packed(values), nn.Parameter(values.clone())
    for parameter in (weight, plain):
        parts = F.linear(x, parameter).square(), parameter[1:3], parameter.split_with_sizes([2, 4])[1]
        torch.cat([part.flatten() for part in parts]).sum().backward()
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
@pytest.mark.usefixtures("packs_small_weights")
def test_a_changed_weight_is_packed_anew() -> None:
    linear, x = nn.Linear(6, 6, bias=False), torch.randn(5, 6)
    pack_weights(linear)

    def at_the_old_address(new: torch.Tensor) -> None:
        """Set other data, then the old storage with new values, as conversions of the dtype and back may do."""
        storage = torch.Tensor(linear.weight.untyped_storage())
        linear.weight.data = torch.empty(0)
        linear.weight.data = storage[: new.numel()].view(new.shape).copy_(new)

    for change in (
        lambda new: linear.weight.copy_(new),
        lambda new: setattr(linear.weight, "data", new),
        at_the_old_address,
        lambda new: linear.weight.data.copy_(new),
        lambda new: linear.load_state_dict({"weight": new}),
    ):
        linear(x), F.linear(x, linear.weight[2:])
        new = torch.randn(6, 6)
        change(new)
        assert_product(linear(x), x, new)
        assert_product(F.linear(x, linear.weight[2:]), x, new[2:])


@needs_blocks
@pytest.mark.usefixtures("packs_small_weights")
def test_a_trained_weight_is_packed_anew() -> None:
    """Fused optimisers change no version. Between backward and the step, a packed copy would soon be old."""
    linear, x = nn.Linear(6, 6, bias=False), torch.randn(5, 6)
    pack_weights(linear)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, fused=True)

    def check() -> None:
        with torch.inference_mode():
            assert_product(linear(x), x, linear.weight.detach().clone())

    for _ in range(2):
        loss = linear(x).square().sum()
        check()
        loss.backward()
        check()
        optimizer.step()
        check()
        optimizer.zero_grad()
        check()
    linear.weight.grad = torch.ones(6, 6)  # without a backward pass
    optimizer.step()
    optimizer.zero_grad()
    check()


@pytest.mark.usefixtures("packs_small_weights")
def test_a_packed_model_is_copied_saved_moved_and_trained() -> None:
    model = nn.Sequential(fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)).eval()
    state, x, file = copy.deepcopy(model.state_dict()), torch.randn(2, 3, 16), io.BytesIO()
    expected = model(x).detach()
    pack_weights(model)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with torch.no_grad():
        for other in (model, copy.deepcopy(model), loaded, copy.deepcopy(model).double().float()):
            torch.testing.assert_close(other(x), expected)
        other = copy.deepcopy(model).double()
        torch.testing.assert_close(other(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    trained = fastformer.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True).eval()
    trained.load_state_dict(model[0].state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained(x))
        assert not torch.allclose(model(x), expected)
