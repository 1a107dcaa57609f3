"""Which program of a grid computes which tile: each one once, the longest first over as many heads as the L2 holds."""

import heapq

import pytest
import torch

triton = pytest.importorskip("triton")
from triton import language as tl

from fastformer_kernels.attention.arguments import Arguments
from fastformer_kernels.attention.scores import place
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = needs_kernels
MULTIPROCESSORS = 132


@triton.jit
def places_kernel(found_ptr, tiles, together):
    """Store (rank, head) of each program, int32 `[programs, 2]`."""
    rank, head = place(tiles, together)
    tl.store(found_ptr + 2 * tl.program_id(0), rank)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, head)


def places(tiles: int, heads: int, together: int) -> list[tuple[int, int]]:
    """Return the (rank, head) of each program, as the kernels find it."""
    actual = torch.full((tiles * heads, 2), -1, dtype=torch.int32, device=DEVICE)
    places_kernel[(tiles * heads,)](actual, tiles, together)
    return [(rank, head) for rank, head in actual.tolist()]


def time_over_even(order: list[tuple[int, int]], tiles: int) -> float:
    """Each multiprocessor takes the next block as it becomes free; a tile of 128 rows sees 2 tiles of keys a rank."""
    work = [2 * (tiles - rank) for rank, _ in order]
    free = [0] * MULTIPROCESSORS
    for each in work:
        heapq.heappush(free, heapq.heappop(free) + each)
    return max(free) * MULTIPROCESSORS / sum(work)


def chosen(B: int, H: int, T: int, K: int, right: int = 0) -> int:
    from fastformer_kernels.attention.problem import Problem, side_by_side

    problem = Problem.of(*Arguments(queries=T, keys=T, scale=1.0, right=right))
    return side_by_side(torch.empty(0, dtype=torch.bfloat16), problem, B * H, 2 * T * K * 2)


@pytest.mark.parametrize(("tiles", "heads", "together"), [(1, 1, 1), (3, 4, 1), (3, 4, 4), (5, 7, 3), (2, 9, 4)])
def test_every_tile_has_one_program(tiles, heads, together):
    order = places(tiles, heads, together)
    assert sorted(order) == [(rank, head) for rank in range(tiles) for head in range(heads)]
    for first in range(0, heads, together):
        group = order[first * tiles : (first + together) * tiles]
        assert {head for _, head in group} == set(range(first, min(first + together, heads)))
        assert [rank for rank, _ in group] == sorted(rank for rank, _ in group)  # the longest first


def test_the_longest_first_fills_the_multiprocessors():
    """48 heads of 8 tiles, 36 pairs of key tiles each: 13.1 pairs a multiprocessor, and blocks are whole, so 14.

    Of 16 tiles: two groups, as 24 MiB are keys and values, and half of the L2 is 25.
    """
    for B, H, T, K, most in ((4, 12, 1024, 64, 14 / 13.09), (4, 12, 2048, 64, 1.02)):
        tiles = T // 128
        assert time_over_even(places(tiles, B * H, chosen(B, H, T, K)), tiles) <= most


def test_heads_together_fit_into_half_of_the_cache():
    assert chosen(4, 12, 1024, 64) == 48
    assert chosen(4, 12, 4096, 64) == 24  # 25 of 1 MiB fit: two groups of one size
    assert chosen(1, 1, 1 << 20, 256) == 1  # one head, larger than the cache
    assert chosen(4, 12, 1024, 64, right=-1) == 1  # without causality tiles are as long as one another
