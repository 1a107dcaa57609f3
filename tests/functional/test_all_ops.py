"""The same call twice gives the same bits, forward and backward; no call keeps what the caller may change or drop.

The same run twice from a seed is in `test_train_resume`, the kernels' own order of sums in
`test_fused_attention_backward`.
"""

import gc
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import fastformer
from fastformer import functional
from fastformer.apps.language.model import language_model_loss
from fastformer.apps.translation.model import translation_loss
from fastformer.packing import Layout
from tests.support import language_task, translation_task
from tests.support.closeness import gradients
from tests.support.fused_calls import CALLS, leaves, tensors
from tests.support.fused_op import DEVICE, needs_kernels

BACKENDS = ["reference", pytest.param("triton", marks=needs_kernels)]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", CALLS)
def test_an_op_twice_has_the_same_bits(op: str, backend: str) -> None:
    dropout_p, n = 0.3 if CALLS[op].dropout else 0.0, 37
    inputs, extra = leaves(op, n, DEVICE), CALLS[op].extra(n, DEVICE)
    runs = []
    with fastformer.backend(backend):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            out = tensors(CALLS[op].call(extra, dropout_p, *inputs))
            runs.append([*out, *gradients(out, inputs)])
    first, second, other = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) == (dropout_p == 0.0)


KINDS = [("translation", "reference"), pytest.param("language", "triton", marks=needs_kernels)]


def train(kind: str, seed: int) -> list[Tensor]:
    """Loss and all parameters after a step from a seed, with dropout, label smoothing and clipping."""
    task = translation_task if kind == "translation" else language_task
    settings = {"encoder_layers": 1, "decoder_layers": 1} if kind == "translation" else {"layers": 1}
    model = task.random_model(seed=seed, dropout=0.2, **settings).train().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    lengths = [(5, 3), (1, 4)] if kind == "translation" else [5, 0, 1]
    batch = task.random_batch(lengths).to(DEVICE)  # type: ignore[arg-type]
    loss = (translation_loss if kind == "translation" else language_model_loss)(model, batch, 0.1) / batch.tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [loss.detach(), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_a_training_step_twice_has_the_same_bits(kind: str, backend: str) -> None:
    with fastformer.backend(backend):
        first, second = train(kind, 1), train(kind, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with fastformer.backend("reference"):
        assert not torch.equal(first[0], train(kind, 2)[0])


B, H, T, K = 2, 2, 12, 8


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_layout_copies_its_lengths(make):
    arguments = make([5, 2, 4])
    layout = Layout.from_lengths(arguments)
    arguments[0] = 1
    assert layout.lengths.tolist() == [5, 2, 4]


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


@needs_kernels
@pytest.mark.parametrize("changed", ["key_mask", "target"])
def test_second_derivatives_of_the_kernels_notice_a_change(triton_backend, changed):
    if changed == "target":
        inputs, arguments = drawn((4, 8), (16, 8)), {"target": torch.tensor([1, 2, 3, 4], device=DEVICE)}
        out = functional.linear_cross_entropy(*inputs, **arguments)
    else:
        inputs, lengths = drawn(*[(B, H, T, K)] * 3), {"key_lengths": [T, T - 3], "query_lengths": [T, T - 1]}
        arguments = {name: torch.tensor(x, device=DEVICE) for name, x in lengths.items()}
        arguments |= {"mask": torch.randn(T, T, device=DEVICE), "key_mask": torch.rand(B, T, device=DEVICE) < 0.9}
        out = functional.attention(*inputs, **arguments)
    arguments[changed].zero_()
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


@pytest.mark.slow
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
        results = gc.get_objects()
        return sum(isinstance(each, Tensor) for each in results), len(results)

    for length in range(2, 32):
        call(length)
    gc.freeze()  # collections then look at new objects alone
    counts = [held()]
    for begin in (32, 52, 72):
        for length in range(begin, begin + 20):
            call(length)
        counts.append(held())
    tensors, objects = zip(*[(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)], strict=True)
    # What is kept grows with each twenty calls. Modules that are imported late, by whatever ran before, grow once.
    assert min(tensors) <= 0
    assert min(objects) < 10  # half of one object for each call
