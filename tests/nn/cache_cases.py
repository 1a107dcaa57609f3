"""Stacks with a cache, and those of torch.nn, which read each row anew for each new token.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, S sources, D model width.
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
from tests.support.masks import ahead, right

D, HEADS = 16, 2
LAYERS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True},
    "gelu, no biases": {"activation": "gelu", "bias": False},
    "time first": {"batch_first": False, "norm_first": True},
    "an activation of torch's": {"activation": nn.SiLU()},
}


def stacks(kind: str, **options: Any) -> tuple[Any, Any]:
    """Return a stack of torch.nn and one of fastformer with the same weights, in evaluation mode."""
    torch.manual_seed(0)
    settings = {"d_model": D, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.5, **options}
    reference = build(nn, f"Transformer{kind.capitalize()}", **settings).eval()
    randomise(reference)
    stack = copy.deepcopy(reference)
    fastformer.convert(stack)
    return reference, stack


class Uncached:
    """A stack of torch.nn that reads each row from its start for each new token.

    Attributes:
        rows: all tokens `[length, D]` of each row.
        memories: `[S, D]` of each row, where S differs by row.
    """

    def __init__(self, stack: Any, memories: list[Tensor] | None, rows: int) -> None:
        self.stack, self.memories = stack, memories
        self.rows = [torch.empty(0, D, dtype=torch.float64)] * rows

    @torch.no_grad()
    def read(self, new: list[Tensor]) -> list[Tensor]:
        """Return the outputs at the new tokens of each row."""
        self.rows = [torch.cat(pair) for pair in zip(self.rows, new, strict=True)]
        return [self.run_row(row)[len(self.rows[row]) - len(x) :] for row, x in enumerate(new)]

    def run_row(self, row: int) -> Tensor:
        x = self.rows[row]
        if not len(x):
            return x
        dim = 0 if self.stack.layers[0].self_attn.batch_first else 1
        memory = [] if self.memories is None else [self.memories[row].unsqueeze(dim)]
        return self.stack(x.unsqueeze(dim), *memory, ahead(len(x))).squeeze(dim)  # type: ignore[no-any-return]

    def choose(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        if self.memories is not None:
            self.memories = [self.memories[row] for row in rows]


def drawn(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in lengths]


def assert_reads(stack: Any, cache: KVCache, uncached: Uncached, new: list[Tensor], form: str) -> None:
    """Compare a step on new tokens (equally many, padded or packed) with the outputs of the whole rows."""
    expected = uncached.read(new)
    lengths = torch.tensor([len(x) for x in new])
    if form == "packed":
        out = stack.step(torch.cat(new), cache, Layout.from_lengths(lengths))
        torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=0)
    else:
        x, y = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (new, expected))
        if form == "padded":  # padding comes out as 0
            x, y = torch.cat([x, x.new_full((len(new), 1, D), 7.0)], 1), torch.cat([y, y.new_zeros(len(new), 1, D)], 1)
        if not cache.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        out = stack.step(x, cache, None if form == "equal" else lengths)
        torch.testing.assert_close(out, y, atol=1e-12, rtol=0)
    assert cache.lengths.tolist() == [len(x) for x in uncached.rows]


def caches(kind: str, rows: list[int], hypotheses: int = 1, **options: Any) -> Iterator[tuple[Any, KVCache, Uncached]]:
    """Yield a stack of fastformer, a new cache and the stack of torch.nn; for a decoder, with each form of memory.

    rows: the length of each sentence's memory.
    """
    cache_options = {name: options.pop(name) for name in ("longest", "capacity") if name in options}
    reference, stack = stacks(kind, **options)
    count = len(rows) * hypotheses
    if kind == "encoder":
        yield stack, stack.new_cache(count, **cache_options), Uncached(reference, None, count)
        return
    memories, hidden = drawn(*rows, seed=9), right(rows, max(rows))
    memories_of_rows = [memory for memory in memories for _ in range(hypotheses)]
    to_right = nn.utils.rnn.pad_sequence(memories, batch_first=True)
    to_left = nn.utils.rnn.pad_sequence([x.flip(0) for x in memories], batch_first=True).flip(1)
    forms: dict[str, tuple[Any, ...]] = {"packed": (torch.cat(memories), None, Layout.from_lengths(rows))}
    if len(set(rows)) > 1:
        batch_first = options.get("batch_first", True)
        for name, memory, mask in (("right", to_right, hidden), ("left", to_left, hidden.flip(1))):
            forms[name] = (memory if batch_first else memory.transpose(0, 1), mask, None)
    for memory, mask, layout in forms.values():
        cache = stack.new_cache(memory, mask, memory_layout=layout, hypotheses=hypotheses, **cache_options)
        yield stack, cache, Uncached(reference, list(memories_of_rows), count)
