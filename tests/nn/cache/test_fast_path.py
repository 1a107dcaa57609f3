"""One token a row through unmodified layers takes the fast path, everything else `compose`; both give the same.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, S sources, D model width.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
from fastformer.nn import layer_stack
from fastformer.nn.cache import KVCache
from tests.nn.cache.cache_cases import HEADS, D, Uncached, assert_reads, both, drawn
from tests.support.fused_op import needs_kernels


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


def test_pack_weights_take_the_fast_path(taken: list[int]) -> None:
    stack = ours("decoder", dtype=torch.float32)
    fastformer.nn.pack_weights(stack)
    outputs(stack, filled(stack, "decoder"))
    assert len(taken) == 6


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [
        "autocast",
        "bf16",
        "a dispatch mode",
        "a global hook",
        "the reference backend",
        pytest.param("the kernels", marks=needs_kernels),
    ],
)
def test_modes_and_hooks_of_all_modules(around: str, taken: list[int]) -> None:
    stack = ours("decoder", dtype=torch.bfloat16 if around == "bf16" else torch.float32)
    seen: list[nn.Module] = []
    with contextlib.ExitStack() as context:
        if around == "autocast":
            context.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif around == "a dispatch mode":
            context.enter_context(Looks())
        elif around == "the reference backend":
            context.enter_context(fastformer.backend("reference"))
        elif around == "the kernels":
            context.enter_context(fastformer.backend("triton"))
        elif around == "a global hook":
            handle = register_module_forward_hook(lambda module, given, out: seen.append(module))
            context.callback(handle.remove)
        outputs(stack, filled(stack, "decoder"))
    assert len(taken) == (6 if around == "the reference backend" else 0)
    assert (len(seen) > 0) == (around == "a global hook")


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
