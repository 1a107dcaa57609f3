"""Inference on a CPU: one token a row through unmodified layers takes the fast path, and weights can be packed.

Everything else takes `compose`; both give the same. Products with packed weights are those of the formula.
Letters: B sentences, N hypotheses a sentence, R = B * N rows, S sources, D model width.
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
from tests.nn.cache_cases import HEADS, D, Uncached, assert_reads, both, drawn


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every layer that takes the fast path."""
    steps: list[int] = []
    run = layer_stack.one_token

    def counted(*given: Any) -> Tensor:
        steps.append(1)
        return run(*given)

    monkeypatch.setattr(layer_stack, "one_token", counted)
    return steps


def ours(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"dropout": 0.5, "batch_first": True, "dim_feedforward": 24, "dtype": torch.float64, **options}
    if kind == "encoder":
        made: Any = fastformer.TransformerEncoder(fastformer.TransformerEncoderLayer(D, HEADS, **given), 2)
    else:
        layer = fastformer.TransformerDecoderLayer(D, HEADS, **given)
        made = fastformer.TransformerDecoder(layer, 2, fastformer.RMSNorm(D, dtype=given["dtype"]))
    for x in made.parameters():
        nn.init.normal_(x, std=0.4)
    return made.eval()


def filled(stack: Any, kind: str, **options: Any) -> KVCache:
    """A cache whose two rows have read nothing yet; of a decoder, with memories of two lengths."""
    dtype = next(stack.parameters()).dtype
    if kind == "encoder":
        return stack.new_cache(2, **options)  # type: ignore[no-any-return]
    hidden = torch.tensor([[False] * 3, [False, False, True]])
    return stack.new_cache(torch.stack(drawn(3, 3, seed=9)).to(dtype), hidden, **options)  # type: ignore[no-any-return]


def outputs(stack: Any, cache: KVCache) -> Tensor:
    """Of three tokens at once, of one in one row, and of one token a row twice, by which time lengths differ."""
    dtype = next(stack.parameters()).dtype
    chunk, one, *tokens = (torch.stack(drawn(n, n, seed=n)).to(dtype) for n in (3, 1, 1, 1))
    stack.step(chunk, cache)
    first = stack.step(tokens[0], cache)
    stack.step(one, cache, torch.tensor([1, 0]))
    return torch.cat([first, *(stack.step(x, cache) for x in tokens)], 1)


def general(stack: Any, cache: KVCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_stack, "has_fast_path", lambda *_: False)
        return outputs(stack, cache)


class Doubled(nn.Linear):
    """Two times a linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Shifted(fastformer.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


def _hook(name: str) -> Callable[[Any], Any]:
    return lambda stack: stack.get_submodule(name).register_forward_hook(lambda module, given, out: 2.0 * out)


def _class(name: str, cls: type) -> Callable[[Any], Any]:
    return lambda stack: setattr(stack.get_submodule(name), "__class__", cls)


def _forward(stack: Any) -> None:
    norm = stack.layers[1].norm2
    norm.forward = lambda x: -type(norm).forward(norm, x)


def _drop(stack: Any) -> None:
    stack.layers[0].dropout1.p = 1.0
    stack.layers[0].dropout1.train()


def _drop_weights(stack: Any) -> None:
    stack.layers[1].self_attn.dropout = 1.0
    stack.layers[1].self_attn.train()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on a linear layer": _hook("layers.0.linear1"),
    "a hook on the last projection": _hook("layers.0.self_attn.out_proj"),
    "a subclass of a linear layer": _class("layers.1.linear1", Doubled),
    "a subclass of a norm": _class("layers.0.norm2", Shifted),
    "a forward in the instance": _forward,
    "a parametrised weight": lambda stack: parametrizations.weight_norm(stack.layers[0].linear1),
    "dropout": _drop,
    "dropout of weights": _drop_weights,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_layer_that_is_modified_between_two_steps(
    kind: str, change: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fastformer.nn.inspection.mixing_reason", lambda *_: None
    )  # the parts here see each token alone
    stack = ours(kind)
    unmodified = outputs(stack, filled(stack, kind))
    cache, other = filled(stack, kind), filled(stack, kind)
    CHANGES[change](stack)
    found = outputs(stack, cache)
    torch.testing.assert_close(found, general(stack, other), atol=1e-12, rtol=0)
    assert change == "a parametrised weight" or not torch.allclose(found, unmodified)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize(("name", "value"), [("norm_first", True), ("activation", torch.tanh)])
def test_a_changed_setting_counts_in_the_next_step(kind: str, name: str, value: object) -> None:
    stack = ours(kind)
    cache, other = filled(stack, kind), filled(stack, kind)
    setattr(stack.layers[1], name, value)
    torch.testing.assert_close(outputs(stack, cache), general(stack, other), atol=1e-12, rtol=0)


def test_hooks_of_all_modules_and_autocast_count_in_the_next_step(taken: list[int]) -> None:
    stack, seen = ours("decoder", dtype=torch.float32), []
    handle = register_module_forward_hook(lambda module, given, out: seen.append(module))
    try:
        outputs(stack, filled(stack, "decoder"))
    finally:
        handle.remove()
    assert seen
    with torch.autocast("cpu", torch.bfloat16):
        cache, other = filled(stack, "decoder"), filled(stack, "decoder")
        torch.testing.assert_close(outputs(stack, cache), general(stack, other), atol=0, rtol=0)
    assert not taken


@pytest.mark.parametrize("name", ["linear1", "linear2", "norm2", "self_attn.out_proj"])
def test_changed_weights_count_in_the_next_step(name: str, taken: list[int]) -> None:
    """In place, as other data, and as other parameters."""
    theirs, stack = both("encoder")
    cache, uncached = stack.new_cache(1), Uncached(theirs, None, 1)
    for change in (
        lambda weight, part: weight.data.neg_(),
        lambda weight, part: setattr(weight, "data", weight.data.flip(0)),
        lambda weight, part: setattr(part, "weight", nn.Parameter(weight.data.roll(1, 0))),
    ):
        for each in (theirs, stack):
            part = each.layers[1].get_submodule(name)
            change(part.weight, part)
        cache.crop(0)  # what was read before is of other weights
        uncached.rows = [uncached.rows[0][:0]]
        assert_reads(stack, cache, uncached, drawn(1), "equal")
    assert len(taken) == 6


def test_nan_in_cropped_tokens_reaches_no_output(taken: list[int]) -> None:
    """Of rows of two lengths: tokens of NaN that both have read, and were made to forget."""
    theirs, stack = both("encoder")
    cache, uncached = stack.new_cache(2), Uncached(theirs, None, 2)
    assert_reads(stack, cache, uncached, drawn(4, 2), "padded")
    stack.step(torch.full((2, 3, D), torch.nan, dtype=torch.float64), cache)
    cache.crop(torch.tensor([4, 2]))
    assert_reads(stack, cache, uncached, drawn(1, 1, seed=1), "equal")
    assert len(taken) == 2


EPS32 = 2.0**-24


def needs_blocks(test: Any) -> Any:
    skipped = pytest.mark.skipif(not fast_path._BLOCKS, reason="this PyTorch has no products with blocks")
    return pytest.mark.usefixtures("small")(skipped(test))


@pytest.fixture
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
@pytest.mark.parametrize("M", [1, 2, 5])
def test_every_bias_that_broadcasts(M: int) -> None:
    """oneDNN reads D numbers side by side, wherever those of the bias are: beyond its memory, too."""
    for rows, K in ((6, 4), (4, 6)):
        values, x = torch.randn(rows, K), torch.randn(M, K)
        weight, biases = packed(values), (torch.randn(2 * rows)[::2], torch.randn(1).expand(rows), torch.randn(M, rows))
        for bias in (*biases, torch.randn(1), torch.randn(())):
            check(F.linear(x, weight, bias), x, values, bias)


@needs_blocks
@torch.no_grad()
@pytest.mark.parametrize("M", [2, 5])
def test_nan_and_inf_stay_in_their_row(M: int) -> None:
    for value in (math.nan, math.inf):
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
        check(linear(x), x, new)
        check(F.linear(x, linear.weight[2:]), x, new[2:])


@pytest.mark.usefixtures("small")
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
