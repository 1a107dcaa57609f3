"""Stacks that read with a cache, against torch.nn's modules, which read everything again for each new token.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, S sources, D model width.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn.cache import KVCache, LayerCache
from fastformer.packing import Layout
from tests.support.fused_op import DEVICE, needs_kernels

D, HEADS = 16, 2

LAYERS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu, no biases": {"activation": "gelu", "bias": False},
    "time first": {"batch_first": False, "norm_first": True},
    "an activation of torch's": {"activation": nn.SiLU()},
}


def both(kind: str, final_norm: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    """A stack of torch.nn, and ours of the same weights, in evaluation mode."""
    torch.manual_seed(0)
    given = {"dropout": 0.5, "batch_first": True, "dim_feedforward": 24, **options}
    made: Any = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    stack: Any = nn.TransformerEncoder if kind == "encoder" else nn.TransformerDecoder
    options_of = {"enable_nested_tensor": False} if kind == "encoder" else {}
    theirs = stack(made(D, HEADS, **given), 2, nn.LayerNorm(D) if final_norm else None, **options_of)
    for x in theirs.parameters():
        nn.init.normal_(x, std=0.4)  # biases and norms that matter; layers that differ
    theirs = theirs.double().eval()
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    return theirs, ours


class Uncached:
    """What torch.nn says of each row: the whole row again for each new token.

    Attributes:
        rows: of each row all tokens `[length, D]`.
        memories: of each row `[S, D]`, of its own length.
    """

    def __init__(self, stack: nn.Module, memories: list[Tensor] | None, rows: int) -> None:
        self.stack, self.memories = stack, memories
        self.rows = [torch.empty(0, D, dtype=torch.float64)] * rows

    @torch.no_grad()
    def read(self, new: list[Tensor]) -> list[Tensor]:
        """The outputs at the new tokens of each row."""
        self.rows = [torch.cat(pair) for pair in zip(self.rows, new, strict=True)]
        return [self.alone(row)[len(self.rows[row]) - len(x) :] for row, x in enumerate(new)]

    def alone(self, row: int) -> Tensor:
        x = self.rows[row]
        if not len(x):
            return x
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        first = 0 if self.stack.layers[0].self_attn.batch_first else 1  # type: ignore[union-attr, index]
        x = x.unsqueeze(first)
        if self.memories is None:
            return self.stack(x, mask).squeeze(first)  # type: ignore[no-any-return]
        return self.stack(x, self.memories[row].unsqueeze(first), mask).squeeze(first)  # type: ignore[no-any-return]

    def choose(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        if self.memories is not None:
            self.memories = [self.memories[row] for row in rows]


def padded(x: list[Tensor], batch_first: bool) -> Tensor:
    return nn.utils.rnn.pad_sequence(x, batch_first)


def drawn(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in lengths]


def assert_reads(stack: Any, cache: KVCache, uncached: Uncached, new: list[Tensor], how: str) -> None:
    """New tokens of each row, given as equally many, padded or packed, have the outputs of the whole rows."""
    expected = uncached.read(new)
    lengths = torch.tensor([len(x) for x in new])
    order = cache.batch_first
    if how == "packed":
        found = stack.step(torch.cat(new), cache, Layout.from_lengths(lengths))
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-12, rtol=0)
    else:
        x = padded(new, order)
        if how == "padded":
            x = torch.cat([x, x.new_full((len(new), 1, D) if order else (1, len(new), D), 7.0)], int(order))
        found = stack.step(x, cache, None if how == "equal" else lengths)
        wanted = padded(expected, order)
        torch.testing.assert_close(found.narrow(int(order), 0, wanted.shape[int(order)]), wanted, atol=1e-12, rtol=0)
        assert found.shape == x.shape
        if how == "padded":
            assert not bool(found.select(int(order), -1).any())  # padding comes out as 0
    assert cache.lengths.tolist() == [len(x) for x in uncached.rows]


def caches(kind: str, rows: list[int], hypotheses: int = 1, **options: Any) -> Iterator[tuple[Any, KVCache, Uncached]]:
    """Ours with a new cache, and torch.nn's; of a decoder by each form of memory.

    rows: the length of each sentence's memory.
    """
    more = {name: options.pop(name) for name in ("longest", "capacity") if name in options}
    theirs, ours = both(kind, **options)
    count = len(rows) * hypotheses
    if kind == "encoder":
        yield ours, ours.new_cache(count, **more), Uncached(theirs, None, count)
        return
    memories = drawn(*rows, seed=9)
    of_rows = [memory for memory in memories for _ in range(hypotheses)]
    order = options.get("batch_first", True)
    hidden = torch.arange(max(rows)) >= torch.tensor(rows)[:, None]
    packed = torch.cat(memories)
    made = {
        "right": lambda: ours.new_cache(padded(memories, order), hidden, hypotheses=hypotheses, **more),
        "left": lambda: ours.new_cache(
            padded([x.flip(0) for x in memories], order).flip(int(order)), hidden.flip(1), hypotheses=hypotheses, **more
        ),
        "packed": lambda: ours.new_cache(
            packed, memory_layout=Layout.from_lengths(rows), hypotheses=hypotheses, **more
        ),
    }
    for form in made if len(set(rows)) > 1 else ["packed"]:
        yield ours, made[form](), Uncached(theirs, list(of_rows), count)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("capacity", [None, 16], ids=["growing", "static"])
def test_every_kind_of_layer(kind: str, layer: str, capacity: int | None) -> None:
    """Tokens one by one, a chunk, prompts of different lengths, and one by one again."""
    for stack, cache, uncached in caches(kind, [3, 5, 4], capacity=capacity, **LAYERS[layer]):
        for seed, lengths, how in (
            *((1, (1, 1, 1), "equal"), (2, (1, 1, 1), "equal"), (3, (4, 4, 4), "equal"), (4, (2, 0, 3), "padded")),
            *((5, (1, 1, 1), "equal"), (6, (2, 2, 2), "equal"), (7, (0, 4, 1), "packed"), (8, (1, 1, 1), "equal")),
        ):
            assert_reads(stack, cache, uncached, drawn(*lengths, seed=seed), how)


@pytest.mark.parametrize("capacity", [None, 8], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["self_attn", "multihead_attn"])
def test_attention_drops_its_weights_in_a_step_too(name: str, capacity: int | None) -> None:
    """Of all weights: what is left is the same whoever draws."""
    theirs, ours = both("decoder", dropout=1.0)
    for stack in (theirs, ours):
        getattr(stack.layers[1], name).train()
    memories = drawn(4, 3, seed=1)
    side = {"memory_layout": Layout.from_lengths([4, 3]), "capacity": capacity}
    cache, uncached = ours.new_cache(torch.cat(memories), **side), Uncached(theirs, memories, 2)
    assert_reads(ours, cache, uncached, drawn(2, 3), "packed")  # the first, which attends to itself alone
    assert_reads(ours, cache, uncached, drawn(2, 0), "padded")
    assert_reads(ours, cache, uncached, drawn(1, 1), "equal")


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_operations(kind: str, seed: int) -> None:
    """Random steps, chunks, ragged chunks, reorders, rows that leave, come twice, or are cropped; caches that grow."""
    generator = torch.Generator().manual_seed(seed)

    def pick(below: int, count: int = 1) -> list[int]:
        return torch.randint(below, (count,), generator=generator).tolist()

    capacity = 70 if seed % 2 else None
    N = 1 + seed // 2 % 2 if kind == "decoder" else 1
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
def test_a_whole_transformer(hidden_too: bool) -> None:
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


def test_a_decoder_of_somebody_elses() -> None:
    ours = fastformer.Transformer(D, HEADS, 1, 1, 24, custom_decoder=nn.Identity(), batch_first=True)
    with pytest.raises(TypeError, match=r"decoder must be a fastformer\.TransformerDecoder, not a Identity"):
        ours.new_cache(torch.zeros(1, 2, D))


@needs_kernels
@pytest.mark.parametrize("capacity", [None, 12])
def test_kernels(capacity: int | None, triton_backend: None) -> None:
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


def test_under_autocast_keys_are_what_projections_give() -> None:
    _, ours = both("encoder")
    ours = ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        cache = ours.new_cache(2)
        out = ours.step(torch.randn(2, 3, D), cache)
    assert {x.dtype for layer in cache.layers for x in (layer.keys, layer.values)} == {torch.bfloat16}
    assert out.dtype == torch.float32 and not out.requires_grad  # noqa: PT018


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


def _extra_keys(stack: Any) -> None:
    stack.layers[1].self_attn = fastformer.MultiheadAttention(D, HEADS, add_zero_attn=True, batch_first=True)


def _replace_class(name: str, cls: type) -> Callable[[Any], None]:
    return lambda stack: setattr(stack.get_submodule(name), "__class__", cls)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "the stack has hooks": lambda x: x.register_forward_hook(lambda module, given, out: None),
    r"layers\.1 has hooks": lambda x: x.layers[1].register_forward_pre_hook(lambda module, given: None),
    r"layers\.0\.self_attn has hooks": lambda x: x.layers[0].self_attn.register_forward_hook(lambda *given: None),
    r"layers\.1 is a OwnBlock": _replace_class("layers.1", OwnBlock),
    r"attention in layers\.1 has add_bias_kv or add_zero_attn": _extra_keys,
    r"layers\.1\.linear1 is a Smoothed: it may look at several positions": _replace_class("layers.1.linear1", Smoothed),
    r"layers\.0\.activation is a function": lambda x: setattr(x.layers[0], "activation", lambda y: y),
    r"layers\.0\.self_attn\.out_proj is a Smoothed": _replace_class("layers.0.self_attn.out_proj", Smoothed),
    "the stack has no layers": lambda x: setattr(x, "layers", nn.ModuleList()),
    r"norm is a BatchNorm1d": lambda x: setattr(x, "norm", nn.BatchNorm1d(D)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_cache_would_pass_by_is_refused_with_the_reason(reason: str) -> None:
    _, ours = both("encoder")
    ours.new_cache(1)
    REFUSED[reason](ours)
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        ours.new_cache(1)


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

    @dataclasses.dataclass
    class Unhashable:
        factor: float

        def __call__(self, x: Tensor) -> Tensor:
            return self.factor * x

    with pytest.raises(TypeError, match="token_wise takes functions that are hashable, not a Unhashable"):
        fastformer.token_wise(Unhashable(2.0))
    ours.layers[0].linear1.__class__ = Doubled
    ours.layers[0].activation = Unhashable(2.0)
    assert ours.obstacle() == "layers.0.activation is a function of your own"
    ours.layers[0].activation = fastformer.token_wise(functools.partial(nn.functional.gelu, approximate="tanh"))
    assert ours.obstacle() is None


def test_a_parametrised_part_is_what_it_was() -> None:
    theirs, ours = both("encoder")
    for stack in (theirs, ours):
        nn.utils.parametrizations.weight_norm(stack.layers[1].linear2)  # type: ignore[union-attr, index]
        nn.utils.parametrizations.weight_norm(stack.layers[1].self_attn.out_proj)  # type: ignore[union-attr, index]
        stack.layers[1].linear2.parametrizations.weight.original0.data *= 1.5  # type: ignore[union-attr, index]
        stack.layers[1].self_attn.out_proj.parametrizations.weight.original0.data *= 1.5  # type: ignore[union-attr, index]
    assert ours.obstacle() is None
    assert_reads(ours, ours.new_cache(2), Uncached(theirs, None, 2), drawn(3, 3), "equal")


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
    with pytest.raises(ValueError, match=r"rows must stay among the 2 of their sentence: \[0, 2, 2, 3\]"):
        cache.reorder(torch.tensor([0, 2, 2, 3]))


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_no_rows_and_no_tokens(kind: str, capacity: int | None) -> None:
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
def test_layouts_of_masks_with_gaps(capacity: int | None) -> None:
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
def test_a_nested_memory(nested: torch.layout) -> None:
    theirs, ours = both("decoder")
    memories = drawn(2, 3, seed=9)
    memory = torch.nested.nested_tensor(memories, layout=nested)
    assert_reads(ours, ours.new_cache(memory), Uncached(theirs, memories, 2), drawn(2, 2), "equal")
    with pytest.raises(ValueError, match="memory must not be nested where a mask is given"):
        ours.new_cache(memory, torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("capacity", [None, 80])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("inside", [*itertools.product([True, False], repeat=3)], ids=str)
def test_inference_mode_may_come_and_go(inside: tuple[bool, ...], kind: str, capacity: int | None) -> None:
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


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("capacity", [None, 80])
def test_a_step_that_failed_can_be_repeated(kind: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second layer, behind keys that the first has kept; or where memory does not suffice for a larger cache."""

    def fail(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    def fail_second(self: LayerCache, capacity: int) -> None:
        if self is cache.layers[1]:
            raise MemoryError
        grow(self, capacity)

    grow = LayerCache.grow
    for stack, cache, uncached in caches(kind, [3, 3], capacity=capacity):
        for lengths, how in (((1, 1), "equal"), ((30, 2), "padded"), ((1, 1), "equal"), ((40, 0), "packed")):
            new, before = drawn(*lengths), list(uncached.rows)
            for patched in ((LayerCache, "grow", fail_second), (stack.layers[1], "activation", fail)):
                with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt, MemoryError):
                    patch.setattr(*patched)
                    assert_reads(stack, cache, uncached, new, how)
                uncached.rows = list(before)
                cache.crop(torch.tensor([len(x) for x in before]))  # where nothing had to grow
            assert_reads(stack, cache, uncached, new, how)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("capacity", [None, 80])
def test_rows_move_all_or_none(kind: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may not suffice for any one of the copies that it takes; the call may then be repeated."""
    take = Tensor.index_select
    for stack, cache, uncached in caches(kind, [3, 2], capacity=capacity):
        assert_reads(stack, cache, uncached, drawn(3, 2), "padded")
        for move, chosen in (("reorder", [1, 0]), ("keep", [1, 1])):
            for enough in itertools.count():
                left = itertools.count(enough, -1)

                def short(x: Tensor, *given: Any, left: Iterator[int] = left) -> Tensor:
                    if next(left) == 0:
                        raise MemoryError
                    return take(x, *given)

                before = copy.deepcopy(cache)
                with monkeypatch.context() as patch, contextlib.suppress(MemoryError):
                    patch.setattr(Tensor, "index_select", short)
                    getattr(cache, move)(torch.tensor(chosen))
                    break
                assert_same_cache(cache, before)
            assert enough >= 4  # keys and values of two layers
            uncached.choose(chosen)
            assert_reads(stack, cache, uncached, drawn(1, 1), "equal")


def assert_same_cache(cache: KVCache, other: KVCache) -> None:
    assert torch.equal(cache.lengths, other.lengths)
    lengths = [each.memory_lengths for each in (cache, other) if each.memory_lengths is not None]
    assert not lengths or torch.equal(*lengths)
    for one, two in zip(cache.layers, other.layers, strict=True):
        for x, y in zip(
            (one.keys, one.values, *(one.memory or ())), (two.keys, two.values, *(two.memory or ())), strict=True
        ):
            assert torch.equal(x, y)


def test_what_is_put_in_the_way_later_is_refused_by_the_step() -> None:
    for name in ("", "layers.1", "layers.0.self_attn", "layers.1.multihead_attn"):
        _, ours = both("decoder")
        x = torch.zeros(2, 1, D, dtype=torch.float64)
        cache = ours.new_cache(torch.zeros(2, 3, D, dtype=torch.float64))
        ours.get_submodule(name).register_forward_hook(lambda *given: None)
        with pytest.raises(
            RuntimeError, match=f"^{name or 'the stack'} has hooks, which decoding with a cache does not"
        ):
            ours.step(x, cache)
        assert cache.lengths.tolist() == [0, 0]
    _, ours = both("encoder")
    cache = ours.new_cache(2)
    ours.layers[0].__class__ = type("Mine", (type(ours.layers[0]),), {"forward": lambda self, x: x})
    with pytest.raises(RuntimeError, match=r"^layers\.0 is a Mine, which decoding"):
        ours.step(torch.zeros(2, 1, D, dtype=torch.float64), cache)
    model = fastformer.Transformer(D, HEADS, 1, 1, 24, batch_first=True)
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="the Transformer has hooks, which decoding with a cache does not call"):
        model.new_cache(torch.zeros(1, 2, D))


@pytest.mark.parametrize("capacity", [None, 8])
def test_the_cache_of_another_stack_or_dtype_is_refused(capacity: int | None) -> None:
    """One head's keys, and those of another autocast, would fit into a cache, by being repeated or converted."""
    encoder, decoder = both("encoder")[1].float(), both("decoder")[1].float()
    x, memory = torch.randn(2, 1, D), torch.randn(2, 3, D)
    of_encoder = encoder.new_cache(2, capacity=capacity)
    of_decoder = decoder.new_cache(memory, capacity=capacity)
    with pytest.raises(ValueError, match="the cache is of another stack: not of a TransformerDecoder"):
        decoder.step(x, of_encoder)
    with pytest.raises(ValueError, match="the cache is of another stack: not of a TransformerEncoder"):
        encoder.step(x, of_decoder)
    narrow = fastformer.TransformerEncoder(
        fastformer.TransformerEncoderLayer(D // HEADS, 1, 24, batch_first=True), 2
    ).eval()
    with pytest.raises(ValueError, match=r"it holds 2 heads of 8, torch\.float32, not 1 of 8, torch\.float32"):
        narrow.step(torch.randn(2, 1, D // HEADS), of_encoder)
    wrong = r"the cache must be of this stack, its dtype and its autocast: it holds 2 heads of 8, torch\."
    with torch.autocast("cpu", torch.bfloat16):
        under = encoder.new_cache(2, capacity=capacity)
        with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
            encoder.step(x, of_encoder)
    with pytest.raises(ValueError, match=wrong + "bfloat16, not 2 of 8, torch.float32"):
        encoder.step(x, under)
    encoder.step(x, of_encoder)
    with pytest.raises(ValueError, match=wrong + "float32, not 2 of 8, torch.bfloat16"):
        encoder.bfloat16().step(x.bfloat16(), of_encoder)


def test_a_step_under_a_compiler() -> None:
    for stack, cache, uncached in caches("decoder", [3, 3], capacity=8):
        step = torch.compile(stack.step, backend="eager")
        for t in range(3):
            new = drawn(1, 1, seed=t)
            torch.testing.assert_close(
                step(torch.stack(new), cache), torch.stack(uncached.read(new)), atol=1e-12, rtol=0
            )


def test_a_copy_goes_on_by_itself() -> None:
    """Where a prompt is read once, and continued in many ways."""
    ((stack, cache, uncached),) = caches("encoder", [1, 1])
    assert_reads(stack, cache, uncached, drawn(3, 3), "equal")
    for seed, other in itertools.product((1, 2), [copy.deepcopy(cache)]):
        rows = list(uncached.rows)
        assert_reads(stack, copy.deepcopy(other), uncached, drawn(1, 1, seed=seed), "equal")
        uncached.rows = rows
    assert_reads(stack, cache, uncached, drawn(2, 0, seed=5), "packed")
