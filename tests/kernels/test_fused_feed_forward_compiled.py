"""The fused feed-forward layer under torch.compile, and on fake tensors."""

import math

import pytest
import torch

from fastformer.functional import feed_forward
from tests.kernels.test_fused_feed_forward import dropped_hidden, inputs_of, kept_bytes, leaves
from tests.support.closeness import assert_close, gradients
from tests.support.fused_op import DEVICE, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("triton_backend")]


@pytest.mark.parametrize(("activation", "recompute"), [("relu", False), ("geglu", False), ("gelu", True)])
def test_compiled_is_eager(activation, recompute):
    tensors = leaves(inputs_of((2, 3, 4), 5, 4, activation, dtype=torch.float32))

    def layer(*x):
        return feed_forward(*x, activation=activation, recompute=recompute) * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors), layer(*tensors)
    assert_close(out, expected)
    for a, b in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_with_one_tensor_in_two_places(recompute):
    """torch.compile takes no Function that is given a tensor twice: `call` gives it a view."""
    x, weight, bias = leaves(inputs_of((2, 3, 4), 4, 4, "gelu", dtype=torch.float32))[:3]

    def layer(x, weight, bias):
        return feed_forward(x, weight, bias, weight, bias, activation="gelu", recompute=recompute)

    torch._dynamo.reset()
    out, expected = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, weight, bias), layer(x, weight, bias)
    for a, b in zip(gradients(out, [x, weight, bias]), gradients(expected, [x, weight, bias]), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(("recompute", "kept"), [(False, 5), (True, 1)])
def test_compiled_keeps_as_little(recompute, kept):
    """x and four times its width, or x alone: a compiler may take what is recomputed for what it has already."""
    tensors = leaves(inputs_of((32, 16), 64, 16, "gelu", dtype=torch.float32))

    def layer(*x):
        return feed_forward(*x, activation="gelu", dropout_p=0.5, recompute=recompute)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = kept_bytes(lambda: compiled(*tensors), tensors[1:])
    assert 0 <= found - kept * tensors[0].numel() * 4 <= 8  # and the seed
    with torch.no_grad():
        assert compiled(*tensors).shape == (32, 16)


def test_compiled_with_dropout():
    x, weight1, _ = dropped_hidden("relu", 0.0)
    eye = torch.eye(len(weight1), device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: feed_forward(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    out = compiled(x, weight1, None, eye, None)
    kept = out != 0
    assert abs(int(kept.sum()) - out.numel() / 2) < 5 * math.sqrt(out.numel() / 4)
    assert_close(torch.autograd.grad(out.sum(), weight1)[0][:, 0], 2.0 * kept.sum(0))


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        tensors = leaves(inputs_of((2, 3, 4), 5, 6, "geglu", dtype=torch.float16))
        out = feed_forward(*tensors, activation="geglu", dropout_p=0.5)
        assert out.shape == (2, 3, 6)
        assert out.dtype == torch.float16
        for x, g in zip(tensors, torch.autograd.grad(out.sum(), tensors), strict=True):
            assert g.shape == x.shape
