"""Nothing keeps a view of what the caller may change: it is copied, or its change is noticed, as autograd does."""

import gc
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import fastformer
from fastformer import functional
from fastformer.packing import Layout

B, H, T, K = 2, 2, 12, 8


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_layout_copies_its_lengths(make):
    given = make([5, 2, 4])
    layout = Layout.from_lengths(given)
    given[0] = 1
    assert layout.lengths.tolist() == [5, 2, 4]


def test_changing_the_mask_of_a_layout_does_not_change_the_layout():
    layout = Layout.from_lengths([3, 1])
    layout.mask().logical_not_()
    assert layout.mask().tolist() == [[True, True, True], [True, False, False]]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("changed", [0, 1, 3])
def test_recomputed_feed_forward_notices_a_change(changed, backend):
    inputs = [x * 1.0 for x in leaves((3, 8), (16, 8), (16,), (8, 16), (8,))]
    with fastformer.backend(backend):
        out = functional.feed_forward(*inputs, recompute=True)
    with torch.no_grad():
        inputs[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("changed", ["key_mask", "key_lengths", "query_lengths", "mask", "target"])
def test_second_derivatives_of_the_kernels_notice_a_change(triton_backend, changed):
    if changed == "target":
        inputs, given = leaves((4, 8), (16, 8)), {"target": torch.tensor([1, 2, 3, 4])}
        out = functional.linear_cross_entropy(*inputs, **given)
    else:
        inputs, lengths = leaves(*[(B, H, T, K)] * 3), {"key_lengths": [T, T - 3], "query_lengths": [T, T - 1]}
        given = {name: torch.tensor(x) for name, x in lengths.items()}
        given |= {"mask": torch.randn(T, T), "key_mask": torch.rand(B, T) < 0.9}
        out = functional.attention(*inputs, **given)
    given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("way", ["packed", "padded"])
def test_a_layer_that_is_computed_again_notices_a_change_of_its_mask(way):
    layer = fastformer.TransformerEncoderLayer(K, H, K, 0.0, batch_first=True)
    model = fastformer.TransformerEncoder(layer, 2)
    model.checkpoint_activations, model.padding_free = True, way == "packed"
    mask, padding = torch.randn(T, T), torch.zeros(B, T).bool()
    out = model(torch.randn(B, T, K), mask, padding)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_calls_keep_no_tensors():
    """However many they are, and whatever their sizes: what is remembered goes with what it was made of."""
    layer = fastformer.TransformerEncoderLayer(K, H, K, 0.1, batch_first=True)
    model = fastformer.TransformerEncoder(layer, 1)
    weight = torch.randn(9, K, requires_grad=True)

    def call(length: int) -> None:
        padding = torch.arange(length) >= torch.tensor([[length], [length - 1]])
        causal = torch.nn.Transformer.generate_square_subsequent_mask(length)
        out = model(torch.randn(B, length, K), causal, padding, is_causal=None)
        layout = Layout.from_mask(padding)
        tokens = model.packed(torch.randn(layout.total, K), layout, causal=True)
        loss = functional.linear_cross_entropy(tokens, weight, torch.zeros(layout.total, dtype=torch.int64))
        (out.sum() + loss).backward()
        model.eval()
        model.step(torch.randn(B, 1, K), model.new_cache(B, longest=length))
        model.train()

    def held() -> tuple[int, int]:
        for _ in range(3):  # tuples in tuples stop being tracked one after another
            gc.collect()
        found = gc.get_objects()
        return sum(isinstance(each, Tensor) for each in found), len(found)

    for length in range(2, 32):
        call(length)
    counts = [held()]
    for begin in (32, 132, 232):
        for length in range(begin, begin + 100):
            call(length)
        counts.append(held())
    tensors, objects = zip(*[(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)], strict=True)
    # What is kept grows with each hundred calls. Modules that are imported late, by whatever ran before, grow once.
    assert min(tensors) <= 0
    assert min(objects) < 50  # half of one object for each call
