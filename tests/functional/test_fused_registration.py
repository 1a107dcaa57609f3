"""An op goes to its launcher by the shortest way, and by the dispatcher where anybody looks at it."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastformer
from fastformer import functional
from fastformer.functional import choice
from fastformer_kernels.attention.arguments import Arguments

pytestmark = pytest.mark.skipif(not choice._TRITON, reason="needs Triton")
OP = torch.ops.fastformer.layer_norm.default
ARGUMENTS = (torch.randn(4, 16), torch.ones(16), torch.zeros(16), 1e-5, torch.float32)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def normalise(x: Tensor = ARGUMENTS[0]) -> Tensor:
    with fastformer.backend("triton"):
        return functional.layer_norm(x, 16, ARGUMENTS[1], ARGUMENTS[2])


@pytest.fixture
def dispatched(monkeypatch):
    """The calls that reach the dispatcher."""
    from fastformer.functional.norms import layer_norm

    found = []
    run = layer_norm._forward
    cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
    monkeypatch.setattr(cells["op"], "cell_contents", lambda *args: found.append(1) or OP(*args))
    return found


def test_nobody_looks(dispatched):
    normalise()
    assert not dispatched


def test_a_mode_sees_the_op(dispatched):
    with Seen() as seen:
        found = normalise()
    assert OP in seen.ops
    assert dispatched
    assert torch.equal(found, normalise())


def test_the_profiler_names_the_op(dispatched):
    with torch.profiler.profile() as profile:
        normalise()
    assert "fastformer::layer_norm" in {event.name for event in profile.events()}
    assert dispatched


def test_a_subclass_sees_the_op(dispatched):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(ARGUMENTS[0])
    from fastformer.functional.norms.layer_norm import _forward

    assert _forward(x, None, None, 1e-5, torch.float32)[0].shape == (4, 16)
    assert dispatched


@pytest.mark.parametrize("op", ["forward", "decode", "weights", "backward", "mask_gradient"])
def test_the_ops_of_attention_take_the_arguments_as_the_record_has_them(op):
    """A field is written once: in the record, of which kernels make their arguments."""
    arguments = getattr(torch.ops.fastformer, f"attention_{op}").default._schema.arguments
    assert tuple(argument.name for argument in arguments[-len(Arguments._fields) :]) == Arguments._fields
    from fastformer_kernels.attention.problem import Problem

    assert issubclass(Problem, Arguments)
    assert Problem._fields == Arguments._fields
