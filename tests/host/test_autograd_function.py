"""`autograd_function.call` against `Function.apply`, in every state in which torch looks at a call."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from fastformer.host.autograd_function import call


class Plain(torch.autograd.Function):
    """x * factor."""

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Scaled(Plain):
    """With a forward-mode derivative, which torch.compile does not take."""

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent * ctx.factor * 100  # as no other way gives it


def test_gradients():
    x = torch.ones(3, requires_grad=True)
    y = call(Scaled, x, 2.0)
    y.sum().backward()
    assert y.grad_fn is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_nothing_to_differentiate_leaves_no_graph():
    x = torch.ones(3, requires_grad=True)
    assert call(Scaled, torch.ones(3), 2.0).grad_fn is None
    with torch.no_grad():
        assert not call(Scaled, x, 2.0).requires_grad
    with torch.inference_mode():
        assert call(Scaled, x, 2.0).is_inference()


@pytest.mark.skipif(
    not isinstance(vars(torch.autograd.Function)["apply"], classmethod), reason="this torch binds them in C++"
)
def test_arguments_are_not_bound_by_name(monkeypatch):
    def fail(*_):
        raise AssertionError("inspect.signature")

    monkeypatch.setattr("inspect.signature", fail)
    call(Scaled, torch.ones(3, requires_grad=True), 2.0)
    with pytest.raises(AssertionError, match=r"inspect\.signature"):
        Scaled.apply(torch.ones(3, requires_grad=True), 2.0)


def test_transforms_see_the_function():
    x = torch.ones(3)
    assert torch.equal(torch.func.grad(lambda x: call(Scaled, x, 2.0).sum())(x), torch.full((3,), 2.0))
    with forward_ad.dual_level():
        out = call(Scaled, forward_ad.make_dual(x, torch.ones(3)), 2.0)
        assert torch.equal(forward_ad.unpack_dual(out).tangent, torch.full((3,), 200.0))


def test_a_tensor_that_a_transform_left_behind():
    """It stays a wrapper when its transform has ended, and is taken for what it wraps."""
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(3))
    out = call(Scaled, kept[0], 2.0)
    assert torch.equal(out + 0, torch.full((3,), 2.0))
    y = torch.ones(3, requires_grad=True)
    (call(Scaled, y, 2.0) * kept[0]).sum().backward()
    assert torch.equal(y.grad, torch.full((3,), 2.0))


def test_compiled():
    run = torch.compile(lambda x: call(Plain, x, 2.0), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    run(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
