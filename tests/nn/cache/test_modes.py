"""Caches under inference mode and compilers, of nested and gapped memories, after failures and as copies.

Letters: B sentences, N hypotheses a sentence, R = B * N rows, t new tokens a row, S sources, D model width.
"""

import copy
import itertools
import pickle

import pytest
import torch

from fastformer.packing import Layout
from tests.nn.cache.cache_cases import Uncached, assert_reads, both, caches, drawn


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


def test_a_step_under_a_compiler() -> None:
    for stack, cache, uncached in caches("decoder", [3, 3], capacity=8):
        step = torch.compile(stack.step, backend="eager")
        for t in range(3):
            new = drawn(1, 1, seed=t)
            torch.testing.assert_close(
                step(torch.stack(new), cache), torch.stack(uncached.read(new)), atol=1e-12, rtol=0
            )


def test_copies() -> None:
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
