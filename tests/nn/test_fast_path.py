"""Inference on a CPU: one token a row through unmodified layers takes the fast path, and weights can be packed.

Every other call takes `compose`; both compute the same. Products with packed weights are those of the formula.
"""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

import fastformer
from fastformer.functional import linear_cross_entropy
from fastformer.nn import fast_path, layer_stack, pack_weights
from fastformer.nn.cache import KVCache
from fastformer.nn.fast_path import PackedWeight
from tests.nn.cache_cases import D, Uncached, assert_reads, drawn, stacks

both_kinds = pytest.mark.parametrize("kind", ["encoder", "decoder"])


@pytest.fixture
def fast_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every layer that takes the fast path."""
    steps: list[int] = []
    run = layer_stack.one_token
    monkeypatch.setattr(layer_stack, "one_token", lambda *arguments: steps.append(1) or run(*arguments))
    return steps


def new_cache(stack: Any, kind: str) -> KVCache:
    """Return the cache of two empty rows; for a decoder, with memories of two lengths."""
    if kind == "encoder":
        return stack.new_cache(2)  # type: ignore[no-any-return]
    hidden = torch.tensor([[False] * 3, [False, False, True]])
    memory = torch.stack(drawn(3, 3, seed=9)).to(next(stack.parameters()).dtype)
    return stack.new_cache(memory, hidden)  # type: ignore[no-any-return]


def outputs(stack: Any, cache: KVCache) -> Tensor:
    """Read three tokens at once, one in one row, and one a row twice, by which time lengths differ."""
    dtype = next(stack.parameters()).dtype
    chunk, one, *tokens = (torch.stack(drawn(n, n, seed=n)).to(dtype) for n in (3, 1, 1, 1))
    stack.step(chunk, cache)
    first = stack.step(tokens[0], cache)
    stack.step(one, cache, torch.tensor([1, 0]))
    return torch.cat([first, *(stack.step(x, cache) for x in tokens)], 1)


def outputs_of_compose(stack: Any, cache: KVCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_stack, "has_fast_path", lambda *_: False)
        return outputs(stack, cache)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Shifted(fastformer.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def hook(module: nn.Module) -> object:
    return module.register_forward_hook(lambda module, inputs, out: 2.0 * out)


def drop(module: Any, name: str) -> None:
    setattr(module, name, 1.0)
    module.train()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on a linear layer": lambda layer: hook(layer.linear1),
    "a hook on the last projection": lambda layer: hook(layer.self_attn.out_proj),
    "a subclass of a linear layer": lambda layer: setattr(layer.linear1, "__class__", Doubled),
    "a subclass of a norm": lambda layer: setattr(layer.norm2, "__class__", Shifted),
    "a forward in the instance": lambda layer: setattr(layer.norm2, "forward", torch.neg),
    "a parametrised weight": lambda layer: parametrizations.weight_norm(layer.linear1),
    "dropout": lambda layer: drop(layer.dropout1, "p"),
    "dropout of weights": lambda layer: drop(layer.self_attn, "dropout"),
    "the order of norms": lambda layer: setattr(layer, "norm_first", True),
    "the activation": lambda layer: setattr(layer, "activation", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
@both_kinds
def test_a_layer_that_is_modified_between_two_steps(
    kind: str, change: str, fast_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastformer.nn.inspection.mixing_reason", lambda *_: None)  # these changes mix no tokens
    _, stack = stacks(kind)
    unmodified = outputs(stack, new_cache(stack, kind))
    assert fast_steps
    cache, other_cache = new_cache(stack, kind), new_cache(stack, kind)
    CHANGES[change](stack.layers[0])
    modified = outputs(stack, cache)
    torch.testing.assert_close(modified, outputs_of_compose(stack, other_cache), atol=1e-12, rtol=0)
    assert change == "a parametrised weight" or not torch.allclose(modified, unmodified)


def test_hooks_of_all_modules_and_autocast_leave_the_fast_path(fast_steps: list[int]) -> None:
    stack, hooked_modules = stacks("decoder")[1].float(), []
    handle = register_module_forward_hook(lambda module, inputs, out: hooked_modules.append(module))
    try:
        outputs(stack, new_cache(stack, "decoder"))
    finally:
        handle.remove()
    assert hooked_modules
    with torch.autocast("cpu", torch.bfloat16):
        results = [run(stack, new_cache(stack, "decoder")) for run in (outputs, outputs_of_compose)]
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert not fast_steps


@pytest.mark.parametrize("name", ["linear1", "linear2", "norm2", "self_attn.out_proj"])
def test_changed_weights_count_in_the_next_step(name: str, fast_steps: list[int]) -> None:
    """Weights are changed in place, by other data, and by other parameters."""
    reference, stack = stacks("encoder")
    cache, uncached = stack.new_cache(1), Uncached(reference, None, 1)
    for change in (
        lambda weight, module: weight.data.neg_(),
        lambda weight, module: setattr(weight, "data", weight.data.flip(0)),
        lambda weight, module: setattr(module, "weight", nn.Parameter(weight.data.roll(1, 0))),
    ):
        for each in (reference, stack):
            module = each.layers[1].get_submodule(name)
            change(module.weight, module)
        cache.crop(0)  # the tokens before were read with other weights
        uncached.rows = [uncached.rows[0][:0]]
        assert_reads(stack, cache, uncached, drawn(1), "equal")
    assert len(fast_steps) == 6


def test_nan_in_cropped_tokens_reaches_no_output(fast_steps: list[int]) -> None:
    """Two rows of different lengths read tokens of NaN, which are then cropped."""
    reference, stack = stacks("encoder")
    cache, uncached = stack.new_cache(2), Uncached(reference, None, 2)
    assert_reads(stack, cache, uncached, drawn(4, 2), "padded")
    stack.step(torch.full((2, 3, D), torch.nan, dtype=torch.float64), cache)
    cache.crop(torch.tensor([4, 2]))
    assert_reads(stack, cache, uncached, drawn(1, 1, seed=1), "equal")
    assert len(fast_steps) == 2


EPS32 = 2.0**-24
needs_blocks = pytest.mark.skipif(not fast_path._BLOCKS, reason="this PyTorch has no products with blocks")


@pytest.fixture
def packs_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "_MIN_PACKED_SIZE", 1)


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
    for change in (
        lambda new: linear.weight.copy_(new),
        lambda new: setattr(linear.weight, "data", new),
        lambda new: linear.load_state_dict({"weight": new}),
    ):
        linear(x), F.linear(x, linear.weight[2:])
        new = torch.randn(6, 6)
        change(new)
        assert_product(linear(x), x, new)
        assert_product(F.linear(x, linear.weight[2:]), x, new[2:])


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
