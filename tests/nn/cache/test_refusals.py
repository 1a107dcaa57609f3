"""What a cache would pass by, and arguments that do not fit, are refused with the reason.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, S sources, D model width.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn.cache import KVCache
from fastformer.packing import Layout
from tests.nn.cache.cache_cases import HEADS, D, Uncached, assert_reads, both, drawn


class Doubled(nn.Module):
    """Two times a linear layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.inner(x)  # type: ignore[no-any-return]


class Smoothed(nn.Linear):
    """A linear layer that looks at the token before, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, -2))


class OwnBlock(fastformer.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return x


def _replace_class(name: str, cls: type) -> Callable[[Any], None]:
    return lambda stack: setattr(stack.get_submodule(name), "__class__", cls)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "the stack has hooks": lambda x: x.register_forward_hook(lambda module, given, out: None),
    r"layers\.1 has hooks": lambda x: x.layers[1].register_forward_pre_hook(lambda module, given: None),
    r"layers\.0\.self_attn has hooks": lambda x: x.layers[0].self_attn.register_forward_hook(lambda *given: None),
    r"layers\.1\.multihead_attn has hooks": lambda x: x.layers[1].multihead_attn.register_forward_hook(print),
    r"layers\.1 is a OwnBlock that overrides forward or a block": _replace_class("layers.1", OwnBlock),
    r"layers\.1\.linear1 is a Smoothed: it may look at several positions": _replace_class("layers.1.linear1", Smoothed),
    "the stack has no layers": lambda x: setattr(x, "layers", nn.ModuleList()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_cache_refuses_modules_that_it_would_skip(reason: str) -> None:
    """By `new_cache`; hooks and other classes of layers also by a step with a cache that was made before."""
    _, ours = both("decoder" if "multihead" in reason else "encoder")
    given = torch.zeros(2, 3, D, dtype=torch.float64) if "multihead" in reason else 2
    cache = ours.new_cache(given)
    REFUSED[reason](ours)
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        ours.new_cache(given)
    if "hooks" in reason or "overrides" in reason:
        with pytest.raises(RuntimeError, match=f"^{reason}"):
            ours.step(torch.zeros(2, 1, D, dtype=torch.float64), cache)
    assert cache.lengths.tolist() == [0, 0]


def test_a_transformer_with_hooks_makes_no_cache() -> None:
    model = fastformer.Transformer(D, HEADS, 1, 1, 24, batch_first=True)
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="the Transformer has hooks, which decoding with a cache does not call"):
        model.new_cache(torch.zeros(1, 2, D))


def test_declared_parts_are_token_wise() -> None:
    """With a cache and without padding; the class itself, not its subclasses."""
    theirs, ours = both("decoder")
    for stack in (theirs, ours):
        for layer in stack.layers:  # type: ignore[union-attr]
            layer.linear1 = Doubled(layer.linear1)
    assert ours.obstacle() == "layers.0.linear1 is a Doubled"
    fastformer.token_wise(Doubled)
    assert ours.obstacle() is None
    memories = drawn(4, 4, seed=9)
    uncached = Uncached(theirs, memories, 2)
    cache = ours.new_cache(torch.stack(memories))
    for t in range(3):
        assert_reads(ours, cache, uncached, drawn(1, 1, seed=t), "equal")
    ours.layers[0].linear1.__class__ = type("More", (Doubled,), {})
    assert ours.obstacle() == "layers.0.linear1 is a More"
    for wrong in (ours.layers[1].linear1, "Doubled", int):
        with pytest.raises(TypeError, match="token_wise takes a class of modules or a function, not"):
            fastformer.token_wise(wrong)

    ours.layers[0].linear1.__class__ = Doubled
    ours.layers[0].activation = functools.partial(nn.functional.gelu, approximate="none")
    assert ours.obstacle() == "layers.0.activation is a function that is not declared token_wise"
    ours.layers[0].activation = fastformer.token_wise(functools.partial(nn.functional.gelu, approximate="tanh"))
    assert ours.obstacle() is None


WRONG: dict[str, tuple[str, Callable[[Any, KVCache], object]]] = {
    "rows": (
        r"x must be of shape \[2, tokens, width\], not \[3, 1, 16\]",
        lambda s, c: s.step(torch.zeros(3, 1, D), c),
    ),
    "dimensions": (r"x must be of shape \[2, tokens, width\]", lambda s, c: s.step(torch.zeros(2, D), c)),
    "tokens": (
        r"x must be \[3, width\], as lengths says, of 2 sequences, not \[4, 16\] of 2",
        lambda s, c: s.step(torch.zeros(4, D), c, Layout.from_lengths([1, 2])),
    ),
    "sequences": (
        r"of 2 sequences, not \[3, 16\] of 3",
        lambda s, c: s.step(torch.zeros(3, D), c, Layout.from_lengths([1, 1, 1])),
    ),
    "lengths": ("a length of 3 is beyond", lambda s, c: s.step(torch.zeros(2, 2, D), c, torch.tensor([3, 1]))),
    "few lengths": (
        "padded has 2 rows, lengths has 1",
        lambda s, c: s.step(torch.zeros(2, 2, D), c, torch.tensor([1])),
    ),
    "reorder": (r"rows must be of shape \[2\], not \[1\]", lambda s, c: c.reorder(torch.tensor([0]))),
    "reorder far": ("rows must be below 2, not 2", lambda s, c: c.reorder(torch.tensor([0, 2]))),
    "keep": ("sentences must not be negative: -1", lambda s, c: c.keep(torch.tensor([-1]))),
    "crop": (
        r"lengths must be from 0 to \[0, 0\], of each row, not \[1, 0\]",
        lambda s, c: c.crop(torch.tensor([1, 0])),
    ),
    "crop all": (r"lengths must be from 0 to \[0, 0\]", lambda s, c: c.crop(-1)),
    "stack": (
        "the cache is of another stack: it has 2 layers",
        lambda s, c: _one_layer(s).step(torch.zeros(2, 1, D), c),
    ),
    "new rows": ("rows must be a whole number, at least 0, not 1.5", lambda s, c: s.new_cache(1.5)),
    "longest": ("longest must be at least 1, not 0", lambda s, c: s.new_cache(1, longest=0)),
    "capacity": ("capacity must be at least 1, not 0", lambda s, c: s.new_cache(1, capacity=0)),
    "both": ("longest must be None with capacity", lambda s, c: s.new_cache(1, longest=3, capacity=8)),
}


def _one_layer(stack: Any) -> Any:
    short = copy.deepcopy(stack)
    short.layers = short.layers[:1]
    return short


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    _, ours = both("encoder")
    ours = ours.float()
    message, call = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(ours, ours.new_cache(2))


def test_wrong_memories_and_hypotheses() -> None:
    _, ours = both("decoder")
    memory = torch.zeros(2, 3, D, dtype=torch.float64)
    for mask in (torch.zeros(3, 2, dtype=torch.bool), torch.full((2, 3), 0.5), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"memory must be a padded batch, with a mask \[B, S\]"):
            ours.new_cache(memory, mask)
    with pytest.raises(ValueError, match="memory_key_padding_mask must be None with memory_layout"):
        ours.new_cache(memory[0], torch.zeros(2, 3, dtype=torch.bool), memory_layout=Layout.from_lengths([2, 1]))
    with pytest.raises(ValueError, match="hypotheses must be at least 1, not 0"):
        ours.new_cache(memory, hypotheses=0)
    cache = ours.new_cache(memory, hypotheses=2)
    with pytest.raises(ValueError, match=r"rows must be among the 2 of the same sentence, not \[0, 2, 2, 3\]"):
        cache.reorder(torch.tensor([0, 2, 2, 3]))


@pytest.mark.parametrize("capacity", [None, 8])
def test_the_cache_of_another_stack_or_dtype_is_refused(capacity: int | None) -> None:
    """One head's keys, and those of another autocast, would fit into a cache, by being repeated or converted."""
    encoder, decoder = both("encoder")[1].float(), both("decoder")[1].float()
    x, memory = torch.randn(2, 1, D), torch.randn(2, 3, D)
    cache = encoder.new_cache(2, capacity=capacity)
    with pytest.raises(ValueError, match="the cache is of another stack"):
        decoder.step(x, cache)
    with pytest.raises(ValueError, match="the cache is of another stack"):
        encoder.step(x, decoder.new_cache(memory, capacity=capacity))
    wrong = r"the cache must be of this stack, its dtype and its autocast: it holds 2 heads of 8, torch\."
    with torch.autocast("cpu", torch.bfloat16):
        under = encoder.new_cache(2, capacity=capacity)
        with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
            encoder.step(x, cache)
    with pytest.raises(ValueError, match=wrong + "bfloat16, not 2 of 8, torch.float32"):
        encoder.step(x, under)
    encoder.step(x, cache)
    with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
        encoder.bfloat16().step(x.bfloat16(), cache)


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_cache_of_another_stack_of_the_same_shape_is_refused(kind: str, capacity: int | None) -> None:
    """Its keys and values are of other weights; refused by a stack without a cache and by one with a cache."""
    memory = torch.randn(2, 3, D, dtype=torch.float64)
    given = (2,) if kind == "encoder" else (memory,)
    _, stack = both(kind)
    _, other = both(kind)
    cache = stack.new_cache(*given, capacity=capacity)
    x = torch.randn(2, 1, D, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(ValueError, match="the cache is of another stack: make one with new_cache of this stack"):
            other.step(x, cache)
        other.new_cache(*given, capacity=capacity)
    assert cache.lengths.tolist() == [0, 0]
    stack.step(x, cache)
