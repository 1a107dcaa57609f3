"""torch.compile: one graph without a break, few compilations over batches of all shapes, the numbers of eager.

What is promised, where the same arguments are given at each call (a mask given or not is another call):

- `dynamic=True`: 1 compilation.
- The default, `dynamic=None`: 2 at most, one for the first batch, one for all shapes.
- torch.compile takes sizes of 1 for constants: a batch of one sequence, and sequences of one token, cost one more each.

Compilations are what dynamo records; a graph that it starts anew within one (as it does for the epsilon of a norm with
dynamic=True, of torch's modules too) counts once. With TORCH_LOGS=recompiles it says why there are more.
"""

import pytest
import torch

import fastformer
from fastformer import functional
from tests.support.closeness import assert_close, assert_same
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
# In `make long` alone: a module that takes the same masks is compiled here or in test_compiled_stacks.py.
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
