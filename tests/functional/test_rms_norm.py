"""functional.rms_norm and the RMSNorm module."""

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import fastformer
from fastformer.functional import rms_norm
from tests.support.closeness import assert_close, gradients, random


@pytest.mark.parametrize(("shape", "normalized"), [((1, 1), 1), ((5, 3, 7), 7), ((3, 5, 2, 3), (5, 2, 3)), ((0, 4), 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(shape, normalized, affine, eps, dtype):
    size = (normalized,) if isinstance(normalized, int) else normalized
    given = [random(*shape, dtype=dtype), *([random(*size, dtype=dtype)] if affine else [])]
    out = rms_norm(given[0], normalized, given[1] if affine else None, eps)
    wide = [t.detach().double().requires_grad_() for t in given]
    added = torch.finfo(dtype).eps if eps is None else eps
    expected = wide[0] / (wide[0].pow(2).mean(tuple(range(-len(size), 0)), keepdim=True) + added).sqrt()
    expected = expected * wide[1] if affine else expected
    assert_close(out, expected.to(dtype))
    for actual, wanted in zip(gradients(out, given), gradients(expected, wide), strict=True):
        assert_close(actual, wanted.to(dtype))


def test_first_and_second_derivative():
    inputs = (random(2, 3), random(3))
    assert gradcheck(lambda x, weight: rms_norm(x, 3, weight), inputs)
    assert gradgradcheck(lambda x, weight: rms_norm(x, 3, weight), inputs)


@pytest.mark.parametrize("settings", [{}, {"eps": 1e-2}, {"elementwise_affine": False}])
def test_the_module_is_torchs(settings):
    ours, torchs = fastformer.RMSNorm((3, 5), **settings), nn.RMSNorm((3, 5), **settings)
    x = random(2, 3, 5, dtype=torch.float32)
    assert repr(ours) == repr(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert_close(ours(x), torchs(x))
