"""Stacks with a cache, and torch.nn's, which read everything again for each new token.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, S sources, D model width.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fastformer
from fastformer.nn.cache import KVCache
from fastformer.packing import Layout
from tests.nn.layer_cases import build, randomise

D, HEADS = 16, 2


LAYERS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu, no biases": {"activation": "gelu", "bias": False},
    "time first": {"batch_first": False, "norm_first": True},
    "an activation of torch's": {"activation": nn.SiLU()},
}


def both(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return a stack of torch.nn, and ours with the same weights, in evaluation mode."""
    torch.manual_seed(0)
    settings = {"d_model": D, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.5, **options}
    theirs = build(nn, f"Transformer{kind.capitalize()}", **settings).eval()
    randomise(theirs)  # biases and norms that matter; layers that differ
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
        """Return the outputs at the new tokens of each row."""
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
    """Compare a step on new tokens (equally many, padded or packed) with the outputs of the whole rows."""
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
    """Yield our stack, a new cache and torch.nn's stack; for a decoder, with each form of memory.

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
