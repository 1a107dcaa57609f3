"""torch.compile: one graph without a break, few compilations over batches of all shapes, the numbers of eager.

What is promised, where the same arguments are given at each call (a mask given or not is another call):

- `dynamic=True`: 1 compilation.
- The default, `dynamic=None`: 2 at most, one for the first batch, one for all shapes.
- torch.compile takes sizes of 1 for constants: a batch of one sequence, and sequences of one token, cost one more each.

Compilations are what dynamo records; a graph that it starts anew within one (as it does for the epsilon of a norm with
dynamic=True, of torch's modules too) counts once. With TORCH_LOGS=recompiles it says why there are more.

Stacks compiled in place (`stack.compile()`) have their packed layers in one graph. `backend="eager"` runs the graph
that dynamo traced; aot_eager traces the backward pass, too.
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fastformer
from fastformer import functional
from fastformer.nn import compiled_stack
from fastformer.nn.rotary import Rotary
from fastformer.packing import Layout
from tests.support.closeness import assert_close, assert_same, gradients
from tests.support.fused_calls import CALLS
from tests.support.fused_calls import leaves as op_leaves
from tests.support.fused_calls import tensors as op_tensors
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.masks import ahead
from tests.support.protocol_cases import CASES, leaves, padding

# All sizes change at the second call, or dynamo would keep one for a constant until it does; none of the first is a
# width of the modules, or it would take the two for one. Sequences of up to 40 tokens are beyond the first table of
# positions, of 8.
SHAPES = [(3, 7), (2, 5), (4, 6), (3, 40), (6, 4), (2, 90)]
# With autograd's graph too, which takes seconds for more than one op.
ALSO_BACKWARD = ("LayerNorm", "MultiheadAttention", "FeedForward", "LinearCrossEntropy")
# In `make long` alone: a module that takes the same masks is compiled here or below.
SMALL = (
    "LayerNorm", "RMSNorm", "MultiheadAttention", "MultiheadAttention, cross", "TransformerEncoder", "FeedForward",
    "LinearCrossEntropy", "TransformerDecoder.packed",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *((name, None) for name in SMALL),
        *(pytest.param(name, None, marks=pytest.mark.long) for name in CASES if name not in SMALL),
        *((name, True) for name in ("LinearCrossEntropy", "TransformerEncoder.packed")),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in ("TransformerEncoder", "TranslationModel")),
    ],
)
def test_one_compilation_for_all_shapes_or_two_where_the_first_is_of_one_shape(name, dynamic, compilations):
    """Gradients are compared for the first two shapes: the graph of one shape, and that of all."""
    case = CASES[name]
    module, _ = case.pair()
    call = case.function(module)
    backend = "aot_eager" if name in ALSO_BACKWARD and dynamic is None else "eager"
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for i, shape in enumerate(SHAPES):
        inputs = case.inputs(*shape, torch.float32)
        assert_same(case.run(compiled, inputs), case.run(call, inputs), leaves(inputs, module) if i < 2 else [])
    assert len(compilations()) == (1 if dynamic else 2), compilations()


def test_evaluation_is_another_graph_and_dropout_differs_from_call_to_call(compilations):
    case = CASES["MultiheadAttention"]
    module, _ = case.pair(dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for shape in SHAPES[:3]:
        inputs = case.inputs(*shape, torch.float32)
        assert not torch.equal(case.run(compiled, inputs), case.run(compiled, inputs))
        with torch.no_grad():
            module.eval()
            assert_close(case.run(compiled, inputs), case.run(module, inputs))
            module.train()
    assert len(compilations()) == 2, compilations()


@pytest.mark.slow
def test_each_choice_of_arguments_is_one_graph(compilations):
    case = CASES["TransformerEncoderLayer, pre-norm"]
    module, _ = case.pair()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for B, L in SHAPES[:3]:
        (x,), _ = case.inputs(B, L, torch.float32)
        hidden = {"src_key_padding_mask": padding(B, L)}
        causal = {"src_mask": ahead(L), "is_causal": True}
        for arguments in (hidden, causal, hidden | causal):
            assert_close(compiled(x, **arguments), module(x, **arguments))
    assert len(compilations()) == 3, compilations()


def test_masks_may_first_be_given_where_sizes_are_symbolic():
    module = fastformer.MultiheadAttention(8, 2, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for i, (B, L) in enumerate(SHAPES[:3]):
        x = torch.randn(B, L, 8)
        masks = {"attn_mask": ahead(L), "key_padding_mask": padding(B, L)} if i == 2 else {}
        assert_same(compiled(x, x, x, **masks), module(x, x, x, **masks), [])


def test_sizes_of_one_are_graphs_of_their_own(compilations):
    case = CASES["MultiheadAttention"]
    module, _ = case.pair()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for shape in [(3, 5), (1, 5), (1, 7), (4, 1), (5, 1), (6, 9), (1, 3), (7, 1)]:
        inputs = case.inputs(*shape, torch.float32)
        assert_close(case.run(compiled, inputs), case.run(module, inputs))
    assert len(compilations()) == 3, compilations()


@needs_kernels
@pytest.mark.parametrize("op", functional.OPS)
def test_fused_ops_have_one_graph_for_all_numbers_of_tokens(op, compilations):
    call = CALLS[op]

    def run(extra, *inputs):
        return op_tensors(call.call(extra, 0.0, *inputs))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    with fastformer.backend("triton"):
        for n in (5, 8, 3):
            inputs, extra = op_leaves(op, n, DEVICE), call.extra(n, DEVICE)
            assert_close(compiled(extra, *inputs), run(extra, *inputs))
    assert len(compilations()) == 1, compilations()


D, H, FF = 8, 2, 12


def encoder(dtype: torch.dtype = torch.float64, **options) -> fastformer.TransformerEncoder:
    layer = fastformer.TransformerEncoderLayer(D, H, FF, 0.0, batch_first=True, dtype=dtype, **options)
    return fastformer.TransformerEncoder(layer, 1)


def batch(B: int, L: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch that requires a gradient, and its padding mask: about half of the positions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, L + 1, (B, 1), generator=generator)
    x = torch.randn(B, L, D, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.arange(L) >= lengths


def bucket_size(layout: Layout) -> tuple[int, int, int]:
    return layout.total, layout.batch, layout.max_length


def test_two_hundred_batches_are_filled_to_few_bucket_sizes():
    sizes = set()
    for seed in range(200):
        x, hidden = batch(12 + seed % 5, 24 + seed % 8, seed=seed)
        real = Layout.from_mask(hidden)
        ((tokens, layout),) = compiled_stack.fill_bucket([(x[~hidden], real)])
        assert len(tokens) == layout.total == layout.offsets[-1] <= real.total * 1.125
        assert layout.offsets.diff().max() <= layout.max_length < 2 * real.max_length
        sizes.add(bucket_size(layout))
    assert len(sizes) <= 16  # of 110 to 250 tokens


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [False, True])
def test_a_stack_compiles_one_graph_for_all_sizes_or_one_a_bucket(buckets, monkeypatch, compilations):
    """Without buckets the second graph is of all sizes; torch makes it when the first size changes."""
    sizes, fill = set(), compiled_stack.fill_bucket

    def recording(sides):
        sides = fill(sides)
        sizes.add(bucket_size(sides[0][1]))
        return sides

    monkeypatch.setattr(compiled_stack, "fill_bucket", recording)
    stack = encoder()
    eager = copy.deepcopy(stack)
    stack.compile(backend="eager", fullgraph=True, buckets=buckets)
    with torch.no_grad():
        for seed in range(9):
            x, hidden = batch(12 + seed % 2, 24 + seed % 3, seed=seed % 2)
            assert_close(stack(x, src_key_padding_mask=hidden), eager(x, src_key_padding_mask=hidden))
    assert len(compilations()) == (len(sizes) if buckets else 2)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [True, pytest.param(False, marks=pytest.mark.long)])
def test_outputs_and_gradients_of_a_compiled_transformer(buckets, compilations):
    torchs = nn.Transformer(D, H, 1, 1, FF, 0.0, batch_first=True, dtype=torch.float64)
    model = copy.deepcopy(torchs)
    fastformer.convert(model)
    eager = copy.deepcopy(model)
    model.compile(backend="aot_eager", fullgraph=True, buckets=buckets)
    for seed, (B, S, T) in enumerate([(3, 20, 17), (5, 24, 9)]):
        (source, hidden_source), (target, hidden_target) = batch(B, S, seed=seed), batch(B, T, seed=seed + 9)
        masks = {"src_key_padding_mask": hidden_source, "memory_key_padding_mask": hidden_source.clone()}
        masks |= {"tgt_key_padding_mask": hidden_target, "tgt_mask": ahead(T), "tgt_is_causal": True}
        results = []
        for each in (model, eager, torchs):
            out = each(source, target, **masks).masked_fill(hidden_target[..., None], 0.0)
            results.append([out, *gradients(out, [source, target, *each.parameters()])])
        assert_close(results[0], results[1])
        assert_close(results[0], results[2])
    assert len(compilations()) <= 4


@pytest.mark.slow
def test_a_stack_compiled_by_inductor_equals_eager():
    stack = encoder(torch.float32)
    eager = copy.deepcopy(stack)
    stack.compile(fullgraph=True, buckets=True)
    x, hidden = batch(4, 12, torch.float32)
    outputs = (each(x, src_key_padding_mask=hidden) for each in (stack, eager))
    assert_same(*outputs, [x, *stack.parameters()], [x, *eager.parameters()])


def test_added_tokens_of_a_bucket_change_no_bit():
    x, hidden = batch(9, 20)
    layout, stack = Layout.from_mask(hidden), encoder()
    results = []
    for scale in (1.0, 1e3):
        ((tokens, filled_layout),) = compiled_stack.fill_bucket([(x[~hidden], layout)])
        assert len(tokens) > layout.total
        tokens = torch.cat([tokens[: layout.total], tokens[layout.total :] * scale])
        out = stack.packed(tokens, filled_layout)[: layout.total]
        results.append([out, *gradients(out, [x, *stack.parameters()])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_graph_of_a_bucket_runs_on_the_memory_of_its_first_batch(compilations):
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
    assert len(compilations()) < 5


def test_copies_and_pickles_are_not_compiled_and_another_graph_includes_the_stack(compilations):
    stack = encoder()
    x, hidden = batch(4, 12)
    eager = stack(x, src_key_padding_mask=hidden)
    stack.compile(backend="eager")
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert_close(copied(x, src_key_padding_mask=hidden), eager)
    assert len(compilations()) == 0
    whole = torch.compile(lambda x: stack(x, src_key_padding_mask=hidden), backend="eager", fullgraph=True)
    assert_close(whole(x), eager)
    assert len(compilations()) == 1


@pytest.mark.parametrize(
    ("setting", "buckets"), [("hook", False), ("need_weights", True), ("mask", False), ("mask", True)]
)
def test_runs_that_need_the_padded_batch_are_compiled_unless_a_mask_is_of_another_size_than_a_bucket(
    setting, buckets, compilations
):
    stack = encoder(rotary=Rotary())
    stack.checkpoint_activations = True
    arguments = {"need_weights": {"need_weights": True}, "mask": {"mask": ~ahead(14).T.tril(-5)}}.get(setting, {})
    if setting == "hook":
        stack.layers[0].register_forward_hook(lambda layer, inputs, out: 1.5 * out)
    x, hidden = batch(5, 14)
    eager = stack(x, src_key_padding_mask=hidden, **arguments)
    stack.compile(backend="eager", buckets=buckets)
    assert_close(stack(x, src_key_padding_mask=hidden, **arguments), eager)
    assert len(compilations()) == (setting != "mask" or not buckets)
