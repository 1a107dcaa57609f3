"""Stacks that read with a cache, against torch.nn's modules, which read everything again for each new token.

Modules that a cache would skip, and arguments that do not fit, are refused with the reason.
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
from tests.nn.cache_cases import HEADS, LAYERS, D, Uncached, assert_reads, caches, drawn, stacks
from tests.support.all_pairs import all_pairs
from tests.support.masks import ahead

both_kinds = pytest.mark.parametrize("kind", ["encoder", "decoder"])


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, D, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layer", "kind", "capacity", "rows"),
    all_pairs(LAYERS, ["encoder", "decoder"], [None, 20], [[3, 5, 4], [3]]),
    ids=str,
)
def test_steps_of_every_kind_of_layer_equal_the_whole_row(
    layer: str, kind: str, capacity: int | None, rows: list[int]
) -> None:
    """Read tokens one by one, a chunk, prompts of different lengths, nothing, and one by one again."""
    for stack, cache, uncached in caches(kind, rows, capacity=capacity, **LAYERS[layer]):
        for seed, (lengths, form) in enumerate([
            ((1, 1, 1), "equal"), ((1, 1, 1), "equal"), ((4, 4, 4), "equal"), ((2, 0, 3), "padded"),
            ((1, 1, 1), "equal"), ((2, 2, 2), "equal"), ((0, 0, 0), "equal"), ((0, 4, 1), "packed"),
            ((0, 0, 0), "padded"), ((1, 1, 1), "equal"),
        ]):  # fmt: skip
            assert_reads(stack, cache, uncached, drawn(*lengths[: len(rows)], seed=seed), form)


@both_kinds
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
                lengths = [pick(len(x) + 1)[0] for x in uncached.rows]
                cache.crop(torch.tensor(lengths))
                uncached.rows = [x[:n] for x, n in zip(uncached.rows, lengths, strict=True)]
            else:
                form = ("equal", "padded", "packed")[action - 3]
                lengths = [1 + 3 * pick(2)[0]] * R if form == "equal" else pick(5, R)
                assert_reads(stack, cache, uncached, drawn(*lengths, seed=100 * seed + turn), form)


def test_a_cache_grows_by_doubling_and_never_beyond_the_longest() -> None:
    ((stack, cache, uncached),) = caches("encoder", [1, 1], longest=80)
    sizes = []
    for t, n in enumerate([1, 31, 1, 31, 1, 15]):
        assert_reads(stack, cache, uncached, drawn(n, n, seed=t), "equal")
        sizes.append(cache.layers[0].keys.shape[2])
    assert sizes == [32, 32, 64, 64, 80, 80]
    with pytest.raises(ValueError, match="longest must be at least the 81 tokens that a row would have, not 80"):
        stack.step(zeros(2, 1), cache)


def test_a_static_cache_keeps_its_tensors_until_it_grows() -> None:
    ((stack, cache, uncached),) = caches("encoder", [1, 1], capacity=3)

    def addresses() -> set[int]:
        return {x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values, cache.lengths)}

    before = addresses()
    for t in range(3):
        assert_reads(stack, cache, uncached, drawn(1, 1, seed=t), "equal")
        cache.reorder(torch.tensor([1, 0]))
        uncached.choose([1, 0])
    assert addresses() == before
    with pytest.raises(ValueError, match="capacity must be at least the 4 tokens of a row, not 3"):
        stack.step(zeros(2, 1), cache)
    cache.grow(5)  # type: ignore[attr-defined]
    assert_reads(stack, cache, uncached, drawn(2, 1, seed=7), "padded")


@pytest.mark.parametrize("hides_memory", [True, False])
def test_steps_of_a_transformer_equal_its_forward(hides_memory: bool) -> None:
    torch.manual_seed(0)
    reference = nn.Transformer(D, HEADS, 2, 2, 24, batch_first=True).double().eval()
    model = copy.deepcopy(reference)
    fastformer.convert(model)
    src, tgt = torch.stack(drawn(5, 5)), torch.stack(drawn(4, 4, seed=1))
    padding = torch.tensor([[False] * 5, [False, False, True, False, True]])
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding if hides_memory else None}
    with torch.no_grad():
        expected = reference(src, tgt, tgt_mask=ahead(4), **masks)
    cache = model.new_cache(src, **masks)
    torch.testing.assert_close(
        torch.cat([model.step(x, cache) for x in tgt.split(1, 1)], 1), expected, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(("kind", "capacity"), [("encoder", None), ("decoder", 8)])
def test_a_cache_without_rows_reads_nothing(kind: str, capacity: int | None) -> None:
    _, stack = stacks(kind)
    cache = stack.new_cache(0 if kind == "encoder" else zeros(0, 3), capacity=capacity)
    for count in (2, 1, 0):
        assert stack.step(zeros(0, count), cache).shape == (0, count, D)
    cache.keep(torch.zeros(0, dtype=torch.int64))
    cache.crop(0)


@pytest.mark.parametrize("capacity", [None, 8])
def test_tokens_and_memories_with_gaps_are_read_without_them(capacity: int | None) -> None:
    """A cache has no gaps; new tokens and memories may come from padded batches that do."""
    layout = Layout.from_mask(torch.tensor([[True, True, False, True, False], [False, True, False, False, True]]))
    reference, stack = stacks("decoder")
    memories, new = drawn(2, 3, seed=9), drawn(2, 3, seed=1)
    uncached = Uncached(reference, memories, 2)
    cache = stack.new_cache(torch.cat(memories), memory_layout=layout, capacity=capacity)
    assert_reads(stack, cache, uncached, drawn(1, 2), "padded")
    out = stack.step(torch.cat(new), cache, layout)
    torch.testing.assert_close(out, torch.cat(uncached.read(new)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_memory_is_read_like_a_padded_one(layout: torch.layout) -> None:
    reference, stack = stacks("decoder")
    memories = drawn(2, 3, seed=9)
    memory = torch.nested.nested_tensor(memories, layout=layout)
    assert_reads(stack, stack.new_cache(memory), Uncached(reference, memories, 2), drawn(2, 2), "equal")
    with pytest.raises(ValueError, match="memory must not be nested where a mask is given"):
        stack.new_cache(memory, torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("inference_modes", "capacity", "kind"),
    all_pairs(itertools.product([True, False], repeat=3), [None, 80], ["encoder", "decoder"]),
    ids=str,
)
def test_caches_are_made_filled_and_rearranged_inside_and_outside_of_inference_mode(
    inference_modes: tuple[bool, ...], kind: str, capacity: int | None
) -> None:
    """A cache holds no autograd graph, so that it can be copied."""
    with torch.inference_mode(inference_modes[0]):
        stack, cache, uncached = next(caches(kind, [3, 2], capacity=capacity))
    for mode, new in itertools.product(inference_modes, ((2, 1), (1, 1), (20, 20))):
        with torch.inference_mode(mode):
            before, lengths = cache.lengths, cache.lengths.tolist()
            assert_reads(stack, cache, uncached, drawn(*new), "padded" if new == (2, 1) else "equal")
            cache.reorder(torch.tensor([1, 0]))
            uncached.choose([1, 0])
            cache.crop(torch.tensor(lengths))
            uncached.rows = [x[:n] for x, n in zip(uncached.rows, lengths, strict=True)]
            cache.keep(torch.tensor([1, 1]))
            uncached.choose([1, 1])
            cache = copy.deepcopy(cache)
            assert capacity or before.tolist() == lengths  # a caller may hold them


def test_a_compiled_step_equals_the_whole_row() -> None:
    for stack, cache, uncached in caches("decoder", [3, 3], capacity=8):
        step = torch.compile(stack.step, backend="eager")
        for t in range(3):
            new = drawn(1, 1, seed=t)
            expected = torch.stack(uncached.read(new))
            torch.testing.assert_close(step(torch.stack(new), cache), expected, atol=1e-12, rtol=0)


def test_copies_of_caches_and_stacks_go_on_independently() -> None:
    ((stack, cache, uncached),) = caches("encoder", [1, 1])
    assert_reads(stack, cache, uncached, drawn(3, 3), "equal")
    rows = list(uncached.rows)
    for seed, (stack_copy, cache_copy) in enumerate([
        (stack, copy.deepcopy(cache)),
        (copy.deepcopy(stack), copy.deepcopy(cache)),
        (pickle.loads(pickle.dumps(stack)), pickle.loads(pickle.dumps(cache))),
    ]):  # fmt: skip
        assert_reads(stack_copy, cache_copy, uncached, drawn(1, 1, seed=seed), "equal")
        uncached.rows = rows
    assert_reads(stack, cache, uncached, drawn(2, 0, seed=5), "packed")


class Doubled(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.linear(x)  # type: ignore[no-any-return]


SMOOTHED = type("Smoothed", (nn.Linear,), {})
OWN_BLOCK = type("OwnBlock", (fastformer.TransformerEncoderLayer,), {"_ff_block": lambda self, x: x})
REFUSED: dict[str, Callable[[Any], Any]] = {
    "the stack has hooks": lambda x: x.register_forward_hook(print),
    r"layers\.1 has hooks": lambda x: x.layers[1].register_forward_pre_hook(print),
    r"layers\.0\.self_attn has hooks": lambda x: x.layers[0].self_attn.register_forward_hook(print),
    r"layers\.1\.multihead_attn has hooks": lambda x: x.layers[1].multihead_attn.register_forward_hook(print),
    r"layers\.1 is a OwnBlock that overrides forward or a block": lambda x: setattr(
        x.layers[1], "__class__", OWN_BLOCK
    ),
    r"layers\.1 is a TransformerEncoderLayer that overrides forward or a block": lambda x: setattr(
        x.layers[1], "_ff_block", torch.tanh
    ),
    r"layers\.1\.linear1 is a Smoothed: it may look at several positions": lambda x: setattr(
        x.layers[1].linear1, "__class__", SMOOTHED
    ),
    "the stack has no layers": lambda x: setattr(x, "layers", nn.ModuleList()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_cache_refuses_modules_that_it_would_skip(reason: str) -> None:
    """`new_cache` refuses all; a step with an earlier cache refuses hooks and other classes of layers."""
    _, stack = stacks("decoder" if "multihead" in reason else "encoder")
    argument = zeros(2, 3) if "multihead" in reason else 2
    cache = stack.new_cache(argument)
    REFUSED[reason](stack)
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        stack.new_cache(argument)
    if "hooks" in reason or "overrides" in reason:
        with pytest.raises(RuntimeError, match=f"^{reason}"):
            stack.step(zeros(2, 1), cache)
    assert cache.lengths.tolist() == [0, 0]


def test_a_transformer_with_hooks_or_a_foreign_decoder_makes_no_cache() -> None:
    model = fastformer.Transformer(D, HEADS, 1, 1, 24, custom_decoder=nn.Identity(), batch_first=True)
    with pytest.raises(TypeError, match=r"decoder must be a fastformer\.TransformerDecoder, not a Identity"):
        model.new_cache(torch.zeros(1, 2, D))
    model = fastformer.Transformer(D, HEADS, 1, 1, 24, batch_first=True)
    model.register_forward_hook(print)
    with pytest.raises(RuntimeError, match="the Transformer has hooks, which decoding with a cache does not call"):
        model.new_cache(torch.zeros(1, 2, D))


def test_modules_and_functions_that_are_declared_token_wise_run_packed_and_with_a_cache() -> None:
    """A declaration is for the class itself, not for its subclasses."""
    reference, stack = stacks("decoder")
    for layer in (*reference.layers, *stack.layers):
        layer.linear1 = Doubled(layer.linear1)
    assert stack.obstacle() == "layers.0.linear1 is a Doubled"
    fastformer.token_wise(Doubled)
    assert stack.obstacle() is None
    memories = drawn(4, 4, seed=9)
    assert_reads(stack, stack.new_cache(torch.stack(memories)), Uncached(reference, memories, 2), drawn(2, 2), "equal")
    layer = stack.layers[0]
    layer.linear1.__class__ = type("Subclass", (Doubled,), {})
    assert stack.obstacle() == "layers.0.linear1 is a Subclass"
    for wrong in (stack.layers[1].linear1, "Doubled", int):
        with pytest.raises(TypeError, match="token_wise takes a class of modules or a hashable function, not"):
            fastformer.token_wise(wrong)
    layer.linear1.__class__ = Doubled
    layer.activation = functools.partial(nn.functional.gelu, approximate="none")
    assert stack.obstacle() == "layers.0.activation is a function that is not declared token_wise"
    layer.activation = fastformer.token_wise(functools.partial(nn.functional.gelu, approximate="tanh"))
    assert stack.obstacle() is None


WRONG: list[tuple[str, Callable[[Any, KVCache], object]]] = [
    (r"x must be of shape \[2, tokens, width\], not \[3, 1, 16\]", lambda s, c: s.step(zeros(3, 1), c)),
    (r"x must be of shape \[2, tokens, width\]", lambda s, c: s.step(zeros(2), c)),
    (
        r"x must be \[3, width\], as lengths says, of 2 sequences, not \[4, 16\] of 2",
        lambda s, c: s.step(zeros(4), c, Layout.from_lengths([1, 2])),
    ),
    ("a length of 3 is beyond", lambda s, c: s.step(zeros(2, 2), c, torch.tensor([3, 1]))),
    ("padded has 2 rows, lengths has 1", lambda s, c: s.step(zeros(2, 2), c, torch.tensor([1]))),
    (r"rows must be of shape \[2\], not \[1\]", lambda s, c: c.reorder(torch.tensor([0]))),
    ("rows must be below 2, not 2", lambda s, c: c.reorder(torch.tensor([0, 2]))),
    ("sentences must not be negative: -1", lambda s, c: c.keep(torch.tensor([-1]))),
    (r"lengths must be from 0 to the cache's, \[0, 0\], not \[1, 0\]", lambda s, c: c.crop(torch.tensor([1, 0]))),
    (
        "the cache is of another stack: it has 2 layers",
        lambda s, c: (setattr(s, "layers", s.layers[:1]), s.step(zeros(2, 1), c)),
    ),
    ("rows must be a whole number, at least 0, not 1.5", lambda s, c: s.new_cache(1.5)),
    ("capacity must be at least 1, not 0", lambda s, c: s.new_cache(1, capacity=0)),
    ("longest must be None with capacity", lambda s, c: s.new_cache(1, longest=3, capacity=8)),
]


def test_wrong_arguments_are_refused_by_name() -> None:
    for message, call in WRONG:
        _, stack = stacks("encoder")
        with pytest.raises(ValueError, match=message):
            call(stack, stack.new_cache(2))
    (_, stack), memory = stacks("decoder"), zeros(2, 3)
    for mask in (torch.zeros(3, 2, dtype=torch.bool), torch.full((2, 3), 0.5), torch.zeros(2, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"memory must be a padded batch, with a mask \[B, S\]"):
            stack.new_cache(memory, mask)
    with pytest.raises(ValueError, match="memory_key_padding_mask must be None with memory_layout"):
        stack.new_cache(memory[0], torch.zeros(2, 3, dtype=torch.bool), memory_layout=Layout.from_lengths([2, 1]))
    with pytest.raises(ValueError, match="hypotheses must be at least 1, not 0"):
        stack.new_cache(memory, hypotheses=0)
    with pytest.raises(ValueError, match=r"rows must be among the 2 of the same sentence, not \[0, 2, 2, 3\]"):
        stack.new_cache(memory, hypotheses=2).reorder(torch.tensor([0, 2, 2, 3]))


def test_the_cache_of_another_dtype_is_refused() -> None:
    """Keys of another autocast would fit into a cache by being converted."""
    encoder, x = stacks("encoder")[1].float(), torch.randn(2, 1, D)
    cache = encoder.new_cache(2)
    message = r"the cache must be of this stack, its dtype and its autocast: it holds 2 heads of 8, torch\."
    with torch.autocast("cpu", torch.bfloat16):
        autocast_cache = encoder.new_cache(2)
        with pytest.raises(ValueError, match=message + "float32, not 2 of 8, torch.bfloat16"):
            encoder.step(x, cache)
    with pytest.raises(ValueError, match=message + "bfloat16, not 2 of 8, torch.float32"):
        encoder.step(x, autocast_cache)
    encoder.step(x, cache)
    with pytest.raises(ValueError, match=message + "float32, not 2 of 8, torch.bfloat16"):
        encoder.bfloat16().step(x.bfloat16(), cache)


@both_kinds
def test_the_cache_of_another_stack_of_the_same_shape_is_refused(kind: str) -> None:
    """A stack refuses it before and after making a cache, because keys and values are those of other weights."""
    argument = 2 if kind == "encoder" else zeros(2, 3)
    (_, stack), (_, other) = stacks(kind), stacks(kind)
    cache = stack.new_cache(argument)
    for _ in range(2):
        with pytest.raises(ValueError, match="the cache is of another stack: make one with new_cache of this stack"):
            other.step(zeros(2, 1), cache)
        other.new_cache(argument)
    assert cache.lengths.tolist() == [0, 0]
    stack.step(zeros(2, 1), cache)
