"""torch's own tools see our modules and ops as they see torch's: exporters, vmap, counters, modes, the profiler."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fastformer
from fastformer import functional
from fastformer.nn.modules import DROP_INS
from tests.support.fused_op import needs_kernels


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


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", ()), func]
        return func(*args, **(kwargs or {}))


@needs_kernels
def test_dispatch_modes_and_the_profiler_see_fused_ops(triton_backend: None) -> None:
    x = torch.randn(4, 16)
    with Ops() as ops:
        functional.layer_norm(x, 16)
    assert torch.ops.fastformer.layer_norm.default in ops.seen
    with torch.profiler.profile() as profile:
        functional.layer_norm(x, 16)
    assert "fastformer::layer_norm" in {event.name for event in profile.events()}
