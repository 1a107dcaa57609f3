"""torch.compile: one graph without a break, few compilations over batches of all shapes, the numbers of eager.

What is promised, with the arguments given staying the same from call to call (a mask given or not is another call):

- `dynamic=True`: 1 compilation.
- As users type it, `dynamic=None`: 2 at most, one for the first batch, one for all shapes.
- torch.compile takes sizes of 1 for constants: a batch of one sequence, and sequences of one token, cost one more each.

Compilations are what dynamo records; a graph that it starts anew within one (as it does for the epsilon of a norm with
dynamic=True, of torch's modules too) counts once. With TORCH_LOGS=recompiles it says why there are more.
"""

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import fastformer
from fastformer import functional
from tests.support.closeness import assert_close, assert_same
from tests.support.fused_calls import CALLS
from tests.support.fused_calls import leaves as op_leaves
from tests.support.fused_calls import tensors as op_tensors
from tests.support.fused_op import DEVICE, needs_kernels
from tests.support.protocol_cases import CASES, Subject, ahead, leaves, padding

# All sizes change at the second call, or dynamo would keep one for a constant until it does; none of the first is a
# width of the modules, or it would take the two for one. Sequences of up to 40 tokens are beyond the first table of
# positions, of 8.
SHAPES = [(3, 7), (2, 5), (4, 6), (5, 8), (3, 40), (6, 4), (7, 9), (2, 90)]
# With autograd's graph too, which takes seconds for more than one op.
ALSO_BACKWARD = ("LayerNorm", "MultiheadAttention", "FeedForward", "LinearCrossEntropy")
# Stacks run these with the same masks, so a size that one of them took for a constant shows there: TransformerEncoder,
# Transformer, TransformerDecoder and `test_each_choice_of_arguments_is_one_graph`. SequenceClassifier has the encoder
# of TokenClassifier.
WITHIN = (
    "TransformerEncoderLayer", "TransformerEncoderLayer, pre-norm", "TransformerDecoderLayer",
    "TransformerDecoderLayer, pre-norm", "TokenClassifier",
)  # fmt: skip
# Others are beside it, or it is in DYNAMIC.
LONG = (
    "TranslationModel", "LanguageModel", "SequenceClassifier, max", "TransformerEncoder", "TransformerEncoder.packed",
)  # fmt: skip
DYNAMIC = ("LinearCrossEntropy", "TransformerEncoder", "TransformerEncoder.packed", "TranslationModel")


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    clear_compilation_metrics()


def compilations() -> list[str]:
    """Why each was necessary; the first says so."""
    return [metric.recompile_reason or "the first" for metric in get_compilation_metrics() if metric.is_forward]


def check(case: Subject, backend: str, dynamic: bool | None) -> None:
    """Compare outputs over all shapes, gradients for the first two: the graph of one shape, and that of all."""
    module, _ = case.pair()
    call = case.function(module)
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for i, shape in enumerate(SHAPES):
        given = case.inputs(*shape, torch.float32)
        assert_same(case.run(compiled, given), case.run(call, given), leaves(given, module) if i < 2 else [])


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES if name not in WITHIN
])  # fmt: skip
def test_two_compilations_for_all_shapes(name):
    check(CASES[name], "aot_eager" if name in ALSO_BACKWARD else "eager", None)
    assert len(compilations()) == 2, compilations()


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_compilation_with_dynamic_shapes(name):
    check(CASES[name], "eager", True)
    assert len(compilations()) == 1, compilations()


@pytest.mark.slow
def test_evaluation_is_another_graph_and_not_more():
    case = CASES["LanguageModel"]
    module, _ = case.pair(dropout=0.5)
    compiled = torch.compile(case.function(module), fullgraph=True, backend="eager", dynamic=True)
    for shape in SHAPES[:4]:
        given = case.inputs(*shape, torch.float32)
        case.run(compiled, given)
        with torch.no_grad():
            module.eval()
            assert_close(case.run(compiled, given), case.run(module, given))
            module.train()
    assert len(compilations()) == 2, compilations()


def test_dropout_differs_from_call_to_call():
    case = CASES["TransformerEncoderLayer"]
    module, _ = case.pair(dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    given = case.inputs(*SHAPES[0], torch.float32)
    assert not torch.equal(case.run(compiled, given), case.run(compiled, given))


@pytest.mark.slow
def test_each_choice_of_arguments_is_one_graph():
    case = CASES["TransformerEncoderLayer, pre-norm"]
    module, _ = case.pair()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for B, L in SHAPES[:4]:
        (x,), _ = case.inputs(B, L, torch.float32)
        hidden = {"src_key_padding_mask": padding(B, L)}
        causal = {"src_mask": ahead(L), "is_causal": True}
        for given in ({}, hidden, causal, hidden | causal):
            assert_close(compiled(x, **given), module(x, **given))
    assert len(compilations()) == 4, compilations()


@pytest.mark.slow
def test_sizes_of_one_are_graphs_of_their_own():
    case = CASES["MultiheadAttention"]
    module, _ = case.pair()
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    for shape in [(3, 5), (1, 5), (1, 7), (4, 1), (5, 1), (6, 9), (1, 3), (7, 1)]:
        given = case.inputs(*shape, torch.float32)
        assert_close(case.run(compiled, given), case.run(module, given))
    assert len(compilations()) == 3, compilations()


@needs_kernels
@pytest.mark.parametrize("op", functional.OPS)
def test_fused_ops_have_one_graph_for_all_numbers_of_tokens(op):
    call = CALLS[op]

    def run(extra, *inputs):
        return op_tensors(call.call(extra, 0.0, *inputs))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    with fastformer.backend("triton"):
        for n in (5, 8, 3):
            inputs, extra = op_leaves(op, n, DEVICE), call.extra(n, DEVICE)
            assert_close(compiled(extra, *inputs), run(extra, *inputs))
    assert len(compilations()) == 1, compilations()
