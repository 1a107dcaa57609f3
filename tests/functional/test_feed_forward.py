"""functional.feed_forward and the FeedForward module."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import fastformer
from fastformer.functional import feed_forward
from tests.support.closeness import (
    assert_close,
    assert_derivatives,
    assert_dropout_rate,
    assert_formula,
    gradients,
    random,
)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "relu": lambda h: h.clamp(min=0),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "geglu": lambda h: gelu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :],
    "swiglu": lambda h: h[..., : h.shape[-1] // 2] * h[..., : h.shape[-1] // 2].sigmoid() * h[..., h.shape[-1] // 2 :],
    "reglu": lambda h: h[..., : h.shape[-1] // 2].clamp(min=0) * h[..., h.shape[-1] // 2 :],
}


def parameters(activation, D, F, out, dtype=torch.float64, bias=True):
    width = 2 * F if activation.endswith("glu") else F
    return [
        random(width, D, dtype=dtype),
        random(width, dtype=dtype) if bias else None,
        random(out, F, dtype=dtype),
        random(out, dtype=dtype) if bias else None,
    ]


# One number; odd sizes and another output width; packed rows; no rows.
@pytest.mark.parametrize(("shape", "F", "out"), [((1, 1), 1, 1), ((3, 2, 5), 7, 4), ((4, 6), 5, 6), ((0, 3), 2, 3)])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_formula(shape, F, out, activation, bias):
    def formula(x, w1, b1, w2, b2):
        hidden = FORMULAS[activation](x @ w1.mT + (b1 if bias else 0))
        return hidden @ w2.mT + (b2 if bias else 0)

    inputs = [random(*shape), *parameters(activation, shape[-1], F, out, bias=bias)]
    assert_formula(formula, inputs, lambda *x: feed_forward(*x, activation=activation))


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("recompute", [False, True])
def test_first_and_second_derivative(activation, recompute):
    inputs = (random(2, 2), *parameters(activation, 2, 2, 1))
    assert_derivatives(lambda *x: feed_forward(*x, activation=activation, recompute=recompute), inputs)


@pytest.mark.parametrize("activation", FORMULAS)
def test_recompute_changes_no_number(activation):
    inputs = [random(3, 5, 4), *parameters(activation, 4, 6, 3)]

    def run(recompute):
        torch.manual_seed(5)  # so that dropout, too, is the same, forward and backward
        out = feed_forward(*inputs, activation=activation, dropout_p=0.5, recompute=recompute)
        torch.manual_seed(6)
        return out, *gradients(out, inputs)

    assert_close(run(True), run(False), roundings=0)


def test_recompute_keeps_nothing_of_the_hidden_width():
    inputs = [random(64, 4, dtype=torch.float32), *parameters("gelu", 4, 16, 4, torch.float32)]
    saved_shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_shapes.append(x.shape), lambda x: x):
        feed_forward(*inputs, activation="gelu", dropout_p=0.5)
        assert torch.Size([64, 16]) in saved_shapes
        saved_shapes.clear()
        feed_forward(*inputs, activation="gelu", dropout_p=0.5, recompute=True)
        fastformer.FeedForward(4, 16, activation="gelu", recompute=True)(inputs[0])
    assert torch.Size([64, 16]) not in saved_shapes


def test_autograd_copies_no_gradient_of_the_hidden_width():
    """ReLU changes the hidden activations in place; if they were a view of a product, backward would copy them."""
    nodes = [feed_forward(random(2, 3, 4), *parameters("relu", 4, 8, 4)).grad_fn]
    for node in nodes:
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert "ReluBackward0" in (names := {node.name() for node in nodes})
    assert not any("CopySlices" in name or "AsStrided" in name for name in names)


def test_dropout_is_of_the_hidden_activations():
    eye = torch.eye(64)
    x = torch.ones(300, 64)
    out = feed_forward(x, eye, None, eye, None, dropout_p=0.25)
    assert_dropout_rate(out == 0, 0.25)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert not feed_forward(x, eye, None, eye, None, dropout_p=1.0).any()

    def seeded(*inputs):
        torch.manual_seed(2)
        return feed_forward(*inputs, activation="gelu", dropout_p=0.5)

    assert gradcheck(seeded, (random(2, 2), *parameters("gelu", 2, 3, 1)))


@pytest.mark.parametrize("activation", FORMULAS)
def test_the_module_computes_the_formula(activation):
    module = fastformer.FeedForward(6, 5, dropout=0.5, activation=activation, dtype=torch.float64).eval()
    x = random(2, 3, 6)
    hidden = FORMULAS[activation](module.linear1(x))
    assert_close(module(x), module.linear2(hidden))
    assert f"activation='{activation}'" in repr(module)
    module.train()
    assert not torch.equal(module(x), module(x))
    frugal = fastformer.FeedForward(6, 5, 0.5, activation, dtype=torch.float64, recompute=True).eval()
    frugal.load_state_dict(module.state_dict())
    assert_close(frugal(x), module.eval()(x))
    assert "recompute=True" in repr(frugal)
