"""functional.layer_norm and the LayerNorm module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import fastformer
from fastformer.functional import dropout_add_layer_norm, layer_norm, rms_norm
from tests.support.closeness import assert_close, gradients, random

# One number; odd sizes; several normalised dimensions; no rows.
SHAPES = [((1, 1), 1), ((5, 3, 7), 7), ((3, 5, 2, 3), (5, 2, 3)), ((0, 4), 4)]


@pytest.mark.parametrize(("shape", "normalized"), SHAPES)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "bias", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(shape, normalized, affine, dtype):
    size = (normalized,) if isinstance(normalized, int) else normalized
    x = random(*shape, dtype=dtype)
    weight = random(*size, dtype=dtype) if "weight" in affine else None
    bias = random(*size, dtype=dtype) if "bias" in affine else None
    out = layer_norm(x, normalized, weight, bias, eps=1e-3)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    dims = tuple(range(-len(size), 0))
    expected = wide[0] - wide[0].mean(dims, keepdim=True)
    expected = expected / (expected.pow(2).mean(dims, keepdim=True) + 1e-3).sqrt()
    expected = expected if wide[1] is None else expected * wide[1]
    expected = expected if wide[2] is None else expected + wide[2]
    assert_close(out, expected.to(dtype))
    given = [t for t in (x, weight, bias) if t is not None]
    for actual, wanted in zip(
        gradients(out, given), gradients(expected, [t for t in wide if t is not None]), strict=True
    ):
        assert_close(actual, wanted.to(dtype))


def test_first_and_second_derivative():
    inputs = (random(2, 3), random(3), random(3))
    call = lambda x, weight, bias: layer_norm(x, 3, weight, bias)  # noqa: E731
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


def test_half_precision_has_fp32_statistics():
    x = (random(4, 512) * 3 + 40).bfloat16()
    assert_close(layer_norm(x, 512), F.layer_norm(x.double(), (512,)).bfloat16(), roundings=1)


@pytest.mark.parametrize("settings", [{}, {"eps": 1e-2}, {"bias": False}, {"elementwise_affine": False}])
def test_the_module_is_torchs(settings):
    ours, torchs = fastformer.LayerNorm((3, 5), **settings), nn.LayerNorm((3, 5), **settings)
    x = random(2, 3, 5, dtype=torch.float32)
    assert repr(ours) == repr(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert_close(ours(x), torchs(x))
    assert_close(ours(input=x), torchs(input=x))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["layer_norm", "dropout_add_layer_norm", "rms_norm"])
def test_parameters_of_a_narrower_dtype_are_widened(op, narrow):
    """As kernels take them, and as FSDP2 gathers them in 16 bits; their gradients have their dtype."""
    x, weight, bias = random(5, 7, dtype=torch.float32), random(7, dtype=narrow), random(7, dtype=narrow)

    def run(weight, bias):
        if op == "rms_norm":
            return rms_norm(x, 7, weight)
        if op == "layer_norm":
            return layer_norm(x, 7, weight, bias)
        return dropout_add_layer_norm(x, x, 7, weight, bias)[0]

    parameters = [weight] if op == "rms_norm" else [weight, bias]
    wide = [p.detach().float().requires_grad_() for p in (weight, bias)]
    out, expected = run(weight, bias), run(*wide)
    assert torch.equal(out, expected)
    for actual, wanted in zip(gradients(out, [x, *parameters]), gradients(expected, [x, *wide]), strict=False):
        assert torch.equal(actual, wanted.to(actual.dtype))
    with pytest.raises(RuntimeError, match="dtype"):  # what torch says of wider ones
        layer_norm(x, 7, weight.double(), bias.double())


def test_a_wrong_shape_raises_what_torch_raises():
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fastformer.LayerNorm(4)(torch.zeros(2, 3))
