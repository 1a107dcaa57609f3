"""What torch's own tools make of our modules and ops: what they could do before, they can or are told how."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer import functional
from fastformer.nn.modules import DROP_INS


@pytest.mark.parametrize("ours", DROP_INS.values())
def test_forward_takes_torchs_arguments_in_torchs_order_and_every_argument_by_position(ours: type[nn.Module]) -> None:
    """torch.onnx's exporter of traces passes every argument of a signature by position."""
    given, expected = (inspect.signature(cls.forward).parameters for cls in (ours, getattr(nn, ours.__name__)))
    assert [*given][: len(expected)] == [*expected]
    assert all(given[name].default is its.default for name, its in expected.items())
    assert {its.kind for its in given.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("length", [100, 20_000])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap_is_torchs(randomness: str, length: int) -> None:
    x = torch.ones(4, length)
    found = []
    for dropout in (functional.dropout, F.dropout):
        torch.manual_seed(0)
        found.append(torch.vmap(lambda row, dropout=dropout: dropout(row, 0.5), randomness=randomness)(x))
    assert torch.equal(*found)
    assert (found[0][0] == found[0][1]).all() == (randomness == "same")


def test_flops_are_counted() -> None:
    attention, x = fastformer.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(x, x, x)
    assert counter.get_total_flops() > 0


@pytest.mark.filterwarnings("ignore")  # torch says that torchao takes the place of torch.ao
def test_static_quantisation_after_revert_is_that_of_torchs_modules() -> None:
    from torch.ao import quantization

    def quantised(model: nn.Module) -> nn.Module:
        whole = nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub()).eval()
        whole.qconfig = quantization.default_qconfig
        prepared = quantization.prepare(whole)
        prepared(x)
        return quantization.convert(prepared)

    x, theirs = torch.randn(3, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ours = copy.deepcopy(theirs)
    fastformer.convert(ours)
    with pytest.raises(RuntimeError, match="QUInt8"):
        quantised(copy.deepcopy(ours))(x)
    fastformer.revert(ours)
    assert torch.equal(quantised(ours)(x), quantised(theirs)(x))
