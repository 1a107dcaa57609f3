"""Stacks that read with a cache, against torch.nn's modules, which read everything again for each new token.

What a cache would pass by, and arguments that do not fit, are refused with the reason.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, S sources, D model width.
"""

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn.cache import KVCache
from fastformer.packing import Layout
from tests.nn.cache_cases import HEADS, LAYERS, D, Uncached, assert_reads, both, caches, drawn
from tests.support.all_pairs import all_pairs
from tests.support.fused_op import DEVICE, needs_kernels


@pytest.mark.parametrize(
    ("layer", "kind", "capacity", "rows"),
    all_pairs(LAYERS, ["encoder", "decoder"], [None, 16], [[3, 5, 4], [3]]),
    ids=str,
)
def test_steps_of_every_kind_of_layer_equal_the_whole_row(
    layer: str, kind: str, capacity: int | None, rows: list[int]
) -> None:
    """Tokens one by one, a chunk, prompts of different lengths, and one by one again."""
    for stack, cache, uncached in caches(kind, rows, capacity=capacity, **LAYERS[layer]):
        for seed, lengths, how in (
            *((1, (1, 1, 1), "equal"), (2, (1, 1, 1), "equal"), (3, (4, 4, 4), "equal"), (4, (2, 0, 3), "padded")),
            *((5, (1, 1, 1), "equal"), (6, (2, 2, 2), "equal"), (7, (0, 4, 1), "packed"), (8, (1, 1, 1), "equal")),
        ):
            assert_reads(stack, cache, uncached, drawn(*lengths[: len(rows)], seed=seed), how)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_equal_the_whole_row_after_any_change_of_rows(kind: str, seed: int) -> None:
    """Random steps, chunks, ragged chunks, reorders, rows that leave, come twice, or are cropped; caches that grow."""
    generator = torch.Generator().manual_seed(seed)

    def pick(below: int, count: int = 1) -> list[int]:
        return torch.randint(below, (count,), generator=generator).tolist()

    capacity = 70 if seed % 2 else None
    N = 1 + seed // 2 if kind == "decoder" else 1
    for stack, cache, uncached in caches(kind, [3, 1, 4], N, capacity=capacity, norm_first=bool(seed % 3)):
        for turn in range(14):
            R, [action] = cache.rows, pick(6)
            if action == 0:
                sources = [N * (r // N) + pick(N)[0] for r in range(R)] if N > 1 else pick(R, R)
                cache.reorder(torch.tensor(sources))
                uncached.choose(sources)
            elif action == 1:
                chosen = pick(R // N, 1 + pick(3)[0])
                cache.keep(torch.tensor(chosen))
                uncached.choose([s * N + n for s in chosen for n in range(N)])
            elif action == 2:
                kept = [pick(len(x) + 1)[0] for x in uncached.rows]
                cache.crop(torch.tensor(kept))
                uncached.rows = [x[:n] for x, n in zip(uncached.rows, kept, strict=True)]
            else:
                how = ("equal", "padded", "packed")[action - 3]
                lengths = [1 + 3 * pick(2)[0]] * R if how == "equal" else pick(5, R)
                assert_reads(stack, cache, uncached, drawn(*lengths, seed=100 * seed + turn), how)


def test_a_cache_grows_by_doubling_and_never_beyond_the_longest() -> None:
    ((stack, cache, uncached),) = caches("encoder", [1, 1], longest=80)
    sizes = []
    for t in range(80):
        assert_reads(stack, cache, uncached, drawn(1, 1, seed=t), "equal")
        sizes.append(cache.layers[0].keys.shape[2])
    assert list(dict.fromkeys(sizes)) == [32, 64, 80]
    with pytest.raises(ValueError, match="longest must be at least the 81 tokens that a row would have, not 80"):
        stack.step(torch.zeros(2, 1, D, dtype=torch.float64), cache)


def test_a_static_cache_keeps_its_tensors_until_it_grows() -> None:
    ((stack, cache, uncached),) = caches("encoder", [1, 1], capacity=3)
    kept = {x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)} | {cache.lengths.data_ptr()}
    for t in range(3):
        assert_reads(stack, cache, uncached, drawn(1, 1, seed=t), "equal")
        cache.reorder(torch.tensor([1, 0]))
        uncached.choose([1, 0])
    assert kept == {x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)} | {
        cache.lengths.data_ptr()
    }
    with pytest.raises(ValueError, match="capacity must be at least the 4 tokens of a row, not 3"):
        stack.step(torch.zeros(2, 1, D, dtype=torch.float64), cache)
    cache.grow(5)  # type: ignore[attr-defined]
    assert_reads(stack, cache, uncached, drawn(2, 1, seed=7), "padded")


@pytest.mark.parametrize("hidden_too", [True, False])
def test_steps_of_a_transformer_equal_its_forward(hidden_too: bool) -> None:
    """The decoder sees the padding of the source, or does not."""
    torch.manual_seed(0)
    theirs = nn.Transformer(D, HEADS, 2, 2, 24, batch_first=True).double().eval()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    src, tgt = torch.stack(drawn(5, 5)), torch.stack(drawn(4, 4, seed=1))
    padding = torch.tensor([[False] * 5, [False, False, True, False, True]])
    memory_padding = padding if hidden_too else None
    mask = theirs.generate_square_subsequent_mask(4, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(src, tgt, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=memory_padding)
    cache = ours.new_cache(src, src_key_padding_mask=padding, memory_key_padding_mask=memory_padding)
    found = torch.cat([ours.step(x, cache) for x in tgt.split(1, 1)], 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@needs_kernels
@pytest.mark.parametrize("capacity", [None, 12])
def test_steps_with_kernels_equal_the_whole_row(capacity: int | None, triton_backend: None) -> None:
    """fp32: sums of at most 24 products in another order, through two layers of norms."""
    theirs, ours = both("decoder", norm_first=True)
    ours = ours.float().to(DEVICE)
    memories, tokens = drawn(3, 2, seed=9), drawn(6, 6)
    uncached = Uncached(theirs, memories, 2)
    memory = torch.cat(memories).float().to(DEVICE)
    cache = ours.new_cache(memory, memory_layout=Layout.from_lengths([3, 2], DEVICE), capacity=capacity)
    expected = torch.stack(uncached.read(tokens)).float()
    x = torch.stack(tokens).float().to(DEVICE)
    found = [ours.step(x[:, :3], cache), *(ours.step(x[:, t : t + 1], cache) for t in range(3, 6))]
    torch.testing.assert_close(torch.cat(found, 1).cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "capacity"), [("encoder", None), ("decoder", 8)])
def test_steps_without_rows_and_without_tokens_change_nothing(kind: str, capacity: int | None) -> None:
    _, ours = both(kind)
    empty = torch.zeros(0, dtype=torch.int64)
    memory = torch.zeros(0, 3, D, dtype=torch.float64)
    cache = ours.new_cache(0 if kind == "encoder" else memory, capacity=capacity)
    for count in (2, 1, 0):
        assert ours.step(torch.zeros(0, count, D, dtype=torch.float64), cache).shape == (0, count, D)
    cache.keep(empty)
    cache.crop(0)
    for stack, read, uncached in caches(kind, [3, 3], capacity=capacity):
        for lengths in ((0, 0), (2, 1), (0, 0), (1, 1)):
            assert_reads(stack, read, uncached, drawn(*lengths), "packed")
        assert stack.step(torch.zeros(2, 0, D, dtype=torch.float64), read).shape == (2, 0, D)
        nothing = stack.step(torch.ones(2, 3, D, dtype=torch.float64), read, torch.tensor([0, 0]))
        assert nothing.shape == (2, 3, D)
        assert not nothing.any()
        assert_reads(stack, read, uncached, drawn(1, 1), "equal")


@pytest.mark.parametrize("capacity", [None, 8])
def test_tokens_and_memories_with_gaps_are_read_without_them(capacity: int | None) -> None:
    """A cache has no gaps; new tokens and memories may come from padded batches that do."""
    hidden = torch.tensor([[True, True, False, True, False], [False, True, False, False, True]])
    layout = Layout.from_mask(hidden)
    theirs, ours = both("decoder")
    memories = drawn(2, 3, seed=9)
    cache = ours.new_cache(torch.cat(memories), memory_layout=layout, capacity=capacity)
    uncached = Uncached(theirs, memories, 2)
    assert_reads(ours, cache, uncached, drawn(1, 2), "padded")
    new = drawn(2, 3, seed=1)
    found, expected = ours.step(torch.cat(new), cache, layout), torch.cat(uncached.read(new))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("nested", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_memory_is_read_like_a_padded_one(nested: torch.layout) -> None:
    theirs, ours = both("decoder")
    memories = drawn(2, 3, seed=9)
    memory = torch.nested.nested_tensor(memories, layout=nested)
    assert_reads(ours, ours.new_cache(memory), Uncached(theirs, memories, 2), drawn(2, 2), "equal")
    with pytest.raises(ValueError, match="memory must not be nested where a mask is given"):
        ours.new_cache(memory, torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("inside", "capacity", "kind"),
    all_pairs(itertools.product([True, False], repeat=3), [None, 80], ["encoder", "decoder"]),
    ids=str,
)
def test_caches_inside_and_outside_of_inference_mode(inside: tuple[bool, ...], kind: str, capacity: int | None) -> None:
    """Made, filled and rearranged inside and outside; a cache keeps no graph, so that it can be copied."""
    with torch.inference_mode(inside[0]):
        stack, cache, uncached = next(caches(kind, [3, 2], capacity=capacity))
    for layer in cache.layers:
        assert not any(x.requires_grad for x in (layer.keys, layer.values, *(layer.memory or ())))
    for mode, new in itertools.product(inside, ((2, 1), (1, 1), (20, 20))):
        with torch.inference_mode(mode):
            before, read = cache.lengths, cache.lengths.tolist()
            assert_reads(stack, cache, uncached, drawn(*new), "padded" if new == (2, 1) else "equal")
            cache.reorder(torch.tensor([1, 0]))
            uncached.choose([1, 0])
            cache.crop(torch.tensor(read))
            uncached.rows = [x[:n] for x, n in zip(uncached.rows, read, strict=True)]
            cache.keep(torch.tensor([1, 1]))
            uncached.choose([1, 1])
            cache = copy.deepcopy(cache)
            assert capacity or before.tolist() == read  # which may be looked at


def test_a_compiled_step_equals_the_whole_row() -> None:
    for stack, cache, uncached in caches("decoder", [3, 3], capacity=8):
        step = torch.compile(stack.step, backend="eager")
        for t in range(3):
            new = drawn(1, 1, seed=t)
            torch.testing.assert_close(
                step(torch.stack(new), cache), torch.stack(uncached.read(new)), atol=1e-12, rtol=0
            )


def test_copies_of_caches_and_stacks_go_on_by_themselves() -> None:
    """Of the cache, of the stack, of both, and pickled: each goes on by itself, as where a prompt is read once."""
    ((stack, cache, uncached),) = caches("encoder", [1, 1])
    assert_reads(stack, cache, uncached, drawn(3, 3), "equal")
    for seed, (its, other) in enumerate(
        [
            (stack, copy.deepcopy(cache)),
            (copy.deepcopy(stack), copy.deepcopy(cache)),
            (stack, pickle.loads(pickle.dumps(cache))),
            (pickle.loads(pickle.dumps(stack)), copy.deepcopy(cache)),
        ]
    ):
        rows = list(uncached.rows)
        assert_reads(its, other, uncached, drawn(1, 1, seed=seed), "equal")
        uncached.rows = rows
    assert_reads(stack, cache, uncached, drawn(2, 0, seed=5), "packed")


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


def test_a_transformer_with_hooks_or_a_foreign_decoder_makes_no_cache() -> None:
    ours = fastformer.Transformer(D, HEADS, 1, 1, 24, custom_decoder=nn.Identity(), batch_first=True)
    with pytest.raises(TypeError, match=r"decoder must be a fastformer\.TransformerDecoder, not a Identity"):
        ours.new_cache(torch.zeros(1, 2, D))
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
        with pytest.raises(TypeError, match="token_wise takes a class of modules or a hashable function, not"):
            fastformer.token_wise(wrong)

    ours.layers[0].linear1.__class__ = Doubled
    ours.layers[0].activation = functools.partial(nn.functional.gelu, approximate="none")
    assert ours.obstacle() == "layers.0.activation is a function that is not declared token_wise"
    ours.layers[0].activation = fastformer.token_wise(functools.partial(nn.functional.gelu, approximate="tanh"))
    assert ours.obstacle() is None


def _one_layer(stack: Any) -> Any:
    short = copy.deepcopy(stack)
    short.layers = short.layers[:1]
    return short


def token(*shape: int) -> Tensor:
    return torch.zeros(*shape, D, dtype=torch.float64)


WRONG: list[tuple[str, Callable[[Any, KVCache], object]]] = [
    (r"x must be of shape \[2, tokens, width\], not \[3, 1, 16\]", lambda s, c: s.step(token(3, 1), c)),
    (r"x must be of shape \[2, tokens, width\]", lambda s, c: s.step(token(2), c)),
    (
        r"x must be \[3, width\], as lengths says, of 2 sequences, not \[4, 16\] of 2",
        lambda s, c: s.step(token(4), c, Layout.from_lengths([1, 2])),
    ),
    ("a length of 3 is beyond", lambda s, c: s.step(token(2, 2), c, torch.tensor([3, 1]))),
    ("padded has 2 rows, lengths has 1", lambda s, c: s.step(token(2, 2), c, torch.tensor([1]))),
    (r"rows must be of shape \[2\], not \[1\]", lambda s, c: c.reorder(torch.tensor([0]))),
    ("rows must be below 2, not 2", lambda s, c: c.reorder(torch.tensor([0, 2]))),
    ("sentences must not be negative: -1", lambda s, c: c.keep(torch.tensor([-1]))),
    (r"lengths must be from 0 to \[0, 0\], of each row, not \[1, 0\]", lambda s, c: c.crop(torch.tensor([1, 0]))),
    ("the cache is of another stack: it has 2 layers", lambda s, c: _one_layer(s).step(token(2, 1), c)),
    ("rows must be a whole number, at least 0, not 1.5", lambda s, c: s.new_cache(1.5)),
    ("capacity must be at least 1, not 0", lambda s, c: s.new_cache(1, capacity=0)),
    ("longest must be None with capacity", lambda s, c: s.new_cache(1, longest=3, capacity=8)),
]


def test_wrong_arguments_are_refused_by_name() -> None:
    _, ours = both("encoder")
    for message, call in WRONG:
        with pytest.raises(ValueError, match=message):
            call(ours, ours.new_cache(2))
    _, ours = both("decoder")
    memory = token(2, 3)
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


def test_the_cache_of_another_dtype_is_refused() -> None:
    """Keys of another autocast would fit into a cache by being converted."""
    encoder, x = both("encoder")[1].float(), torch.randn(2, 1, D)
    cache = encoder.new_cache(2)
    wrong = r"the cache must be of this stack, its dtype and its autocast: it holds 2 heads of 8, torch\."
    with torch.autocast("cpu", torch.bfloat16):
        under = encoder.new_cache(2)
        with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
            encoder.step(x, cache)
    with pytest.raises(ValueError, match=wrong + "bfloat16, not 2 of 8, torch.float32"):
        encoder.step(x, under)
    encoder.step(x, cache)
    with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
        encoder.bfloat16().step(x.bfloat16(), cache)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_cache_of_another_stack_of_the_same_shape_is_refused(kind: str) -> None:
    """Its keys and values are of other weights; refused by a stack without a cache and by one with a cache."""
    given = (2,) if kind == "encoder" else (token(2, 3),)
    (_, stack), (_, other) = both(kind), both(kind)
    cache = stack.new_cache(*given)
    for _ in range(2):
        with pytest.raises(ValueError, match="the cache is of another stack: make one with new_cache of this stack"):
            other.step(token(2, 1), cache)
        other.new_cache(*given)
    assert cache.lengths.tolist() == [0, 0]
    stack.step(token(2, 1), cache)
