"""Stacks compiled in place (`stack.compile()`): packed layers in one graph, with the numbers of eager runs.

`backend="eager"` runs the graph that dynamo traced; aot_eager traces the backward pass, too.
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import fastformer
from fastformer.nn import compiled_stack
from fastformer.nn.rotary import Rotary
from fastformer.packing import Layout
from tests.support.closeness import assert_close, assert_same, gradients
from tests.support.protocol_cases import ahead

D, H, FF = 8, 2, 12


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    clear_compilation_metrics()


def graphs() -> int:
    return sum(metric.is_forward for metric in get_compilation_metrics())


def encoder(dtype: torch.dtype = torch.float64, **options) -> fastformer.TransformerEncoder:
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, dtype=dtype, **options)
    return fastformer.TransformerEncoder(layer, 1)


def batch(B: int, L: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch that requires a gradient, and its padding mask: about half of the positions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, L + 1, (B, 1), generator=generator)
    x = torch.randn(B, L, D, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.arange(L) >= lengths


@pytest.mark.parametrize("buckets", [False, True])
def test_two_hundred_batches_need_one_graph_or_one_a_bucket(buckets, monkeypatch):
    """Without buckets the second graph is of all sizes; torch makes it when the first size changes."""
    sizes, fill = set(), compiled_stack.fill_bucket

    def recording(sides):
        filled = fill(sides)
        (_, real), (tokens, layout) = sides[0], filled[0]
        assert len(tokens) == layout.total == layout.offsets[-1] <= real.total * 1.125
        assert layout.offsets.diff().max() <= layout.max_length < 2 * real.max_length
        sizes.add((layout.total, layout.batch, layout.max_length))
        return filled

    monkeypatch.setattr(compiled_stack, "fill_bucket", recording)
    stack = encoder()
    eager = copy.deepcopy(stack)
    stack.compile(backend="eager", fullgraph=True, buckets=buckets)
    with torch.no_grad():
        for seed in range(200):
            x, hidden = batch(12 + seed % 5, 24 + seed % 8, seed=seed)
            out = stack(x, src_key_padding_mask=hidden)
            if seed % 8 == 0:
                assert_close(out, eager(x, src_key_padding_mask=hidden))
    assert graphs() == (len(sizes) if buckets else 2)
    assert len(sizes) <= 16  # of 110 to 250 tokens


@pytest.mark.parametrize("options", [{}, {"buckets": True}], ids=str)
def test_outputs_and_gradients_of_a_compiled_transformer(options):
    torchs = nn.Transformer(D, H, 1, 1, FF, 0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(torchs)
    fastformer.convert(ours)
    eager = copy.deepcopy(ours)
    ours.compile(backend="aot_eager", fullgraph=True, **options)
    for seed, (B, S, T) in enumerate([(3, 20, 17), (5, 24, 9)]):
        (source, no_sources), (target, no_targets) = batch(B, S, seed=seed), batch(B, T, seed=seed + 9)
        masks = {"src_key_padding_mask": no_sources, "memory_key_padding_mask": no_sources.clone()}
        masks |= {"tgt_key_padding_mask": no_targets, "tgt_mask": ahead(T), "tgt_is_causal": True}
        results = []
        for model in (ours, eager, torchs):
            out = model(source, target, **masks)
            out = out.masked_fill(no_targets[..., None], 0.0)
            results.append([out, *gradients(out, [source, target, *model.parameters()])])
        assert_close(results[0], results[1])
        assert_close(results[0], results[2])
    assert graphs() <= 4


@pytest.mark.slow
def test_inductor():
    stack = encoder(torch.float32)
    eager = copy.deepcopy(stack)
    stack.compile(fullgraph=True, buckets=True)
    x, hidden = batch(4, 12, torch.float32)
    outputs = (each(x, src_key_padding_mask=hidden) for each in (stack, eager))
    assert_same(*outputs, [x, *stack.parameters()], [x, *eager.parameters()])


def test_added_tokens_of_a_bucket_change_no_bit():
    x, hidden = batch(9, 20)
    layout, stack = Layout.from_mask(hidden), encoder()
    found = []
    for scale in (1.0, 1e3):
        ((tokens, full),) = compiled_stack.fill_bucket([(x[~hidden], layout)])
        assert len(tokens) > layout.total
        tokens = torch.cat([tokens[: layout.total], tokens[layout.total :] * scale])
        out = stack.packed(tokens, full)[: layout.total]
        found.append([out, *gradients(out, [x, *stack.parameters()])])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_graph_of_a_bucket_runs_on_the_memory_of_its_first_batch():
    """As CUDA graphs do: inputs of constant sizes on one device are copied to fixed addresses, and nothing is read."""

    def at_fixed_addresses(graph, inputs):
        assert all(isinstance(x, Tensor) and all(type(size) is int for size in x.shape) for x in inputs)
        memory = [x.clone() for x in inputs]

        def replay(*new):
            for old, x in zip(memory, new, strict=True):
                old.copy_(x)
            return graph(*memory)

        return replay

    stack = encoder()
    eager = copy.deepcopy(stack)
    stack.compile(backend=at_fixed_addresses, fullgraph=True, buckets=True)
    with torch.no_grad():
        for seed in range(5):
            x, hidden = batch(8, 20, seed=seed)
            hidden[:, :3], hidden[0] = False, False
            hidden[1:, 12 + seed % 2 :] = True
            assert_close(stack(x, src_key_padding_mask=hidden), eager(x, src_key_padding_mask=hidden))
    assert graphs() < 5


def test_copies_and_pickles_are_not_compiled_and_another_graph_takes_the_stack_in():
    stack = encoder()
    x, hidden = batch(4, 12)
    eager = stack(x, src_key_padding_mask=hidden)
    stack.compile(backend="eager")
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert_close(copied(x, src_key_padding_mask=hidden), eager)
    assert graphs() == 0
    whole = torch.compile(lambda x: stack(x, src_key_padding_mask=hidden), backend="eager", fullgraph=True)
    assert_close(whole(x), eager)
    assert graphs() == 1


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize(("arguments", "compiled"), [
    ({}, True), ({"need_weights": True}, True), ({"mask": ~ahead(14).T.tril(-5)}, False)
], ids=["hook", "need_weights", "mask"])  # fmt: skip
def test_settings(arguments, compiled, buckets):
    """Runs that need the padded batch are compiled, too; a mask is of the size of one batch, not of a bucket."""
    stack = encoder(rotary=Rotary())
    stack.checkpoint_activations = True
    if not arguments:
        stack.layers[0].register_forward_hook(lambda layer, inputs, out: 1.5 * out)
    x, hidden = batch(5, 14)
    eager = stack(x, src_key_padding_mask=hidden, **arguments)
    stack.compile(backend="eager", buckets=buckets)
    assert_close(stack(x, src_key_padding_mask=hidden, **arguments), eager)
    assert graphs() == (compiled or not buckets)
