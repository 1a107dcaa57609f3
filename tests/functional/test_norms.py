"""The norms of fastformer.functional, those that add a residual first, and the modules LayerNorm and RMSNorm."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from tests.support.closeness import assert_close, assert_formula, assert_same, random

# One number; odd sizes; several normalised dimensions; no rows.
SHAPES = [((1, 1), 1), ((5, 3, 7), 7), ((3, 5, 2, 3), (5, 2, 3)), ((0, 4), 4)]


def dimensions(normalized: int | tuple[int, ...]) -> tuple[int, ...]:
    return (normalized,) if isinstance(normalized, int) else normalized


def layer_formula(x: Tensor, size: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm (Ba et al. 2016, equation 3)."""
    dims = tuple(range(-len(size), 0))
    deviation = x - x.mean(dims, keepdim=True)
    normal = deviation / (deviation.square().mean(dims, keepdim=True) + eps).sqrt()
    return normal * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)


def rms_formula(x: Tensor, size: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm (Zhang and Sennrich 2019, equation 4)."""
    normal = x / (x.square().mean(tuple(range(-len(size), 0)), keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * weight


# The op that adds first, its norm as an op, the formula of that, and how many parameters they have.
STEPS = pytest.mark.parametrize(
    ("step", "norm", "formula", "parameters"),
    [(dropout_add_layer_norm, layer_norm, layer_formula, 2), (dropout_add_rms_norm, rms_norm, rms_formula, 1)],
    ids=["layer norm", "RMS norm"],
)


@pytest.mark.parametrize(("shape", "normalized"), SHAPES)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "none"])
@STEPS
def test_values_and_gradients_are_those_of_the_formula(step, norm, formula, parameters, affine, shape, normalized):
    """Of the norm, and of both results of the step, which pre-norm layers use at once."""
    size = dimensions(normalized)
    weights = [random(*size) if name in affine else None for name in ("weight", "bias")[:parameters]]
    assert_formula(
        lambda x, *more: formula(x, size, *more, 1e-3),
        [random(*shape), *weights],
        lambda x, *more: norm(x, normalized, *more, eps=1e-3),
    )
    assert_formula(
        lambda x, residual, *more: (formula(x + residual, size, *more, 1e-3), x + residual),
        [random(*shape), random(*shape), *weights],
        lambda x, residual, *more: step(x, residual, normalized, *more, eps=1e-3),
    )


@STEPS
def test_the_norm_is_that_of_the_total(step, norm, formula, parameters):
    """With several dimensions, an epsilon of torch's choice, and a dtype of its own, rounded once."""
    x, residual = random(2, 3, 5, dtype=torch.float32), random(2, 3, 5, dtype=torch.float32)
    affine = [random(3, 5, dtype=torch.float32) for _ in range(parameters)]
    for dtype in (None, torch.bfloat16):
        normed, total = step(x * 1e-4, residual * 1e-4, (3, 5), *affine, dtype=dtype)
        assert total.dtype == torch.float32
        assert normed.dtype == (dtype or torch.float32)
        assert torch.equal(total, residual * 1e-4 + x * 1e-4)
        assert torch.equal(normed, norm(total, (3, 5), *affine, dtype=dtype))


def test_dropout_touches_x_and_not_the_residual():
    x, residual, totals = torch.full((200, 8), 3.0), random(200, 8, dtype=torch.float32), []
    for step, norm in ((dropout_add_layer_norm, layer_norm), (dropout_add_rms_norm, rms_norm)):
        torch.manual_seed(3)
        normed, total = step(x, residual, 8, dropout_p=0.4)
        assert set((total - residual).round(decimals=3).flatten().tolist()) == {0.0, 5.0}
        assert_close(normed, norm(total, 8))
        assert torch.equal(step(x, residual, 8, dropout_p=1.0)[1], residual)
        totals.append(total)
    assert torch.equal(*totals)  # of one seed


def test_half_precision_has_fp32_statistics():
    x = (random(4, 512) * 3 + 40).bfloat16()
    assert_close(layer_norm(x, 512), F.layer_norm(x.double(), (512,)).bfloat16(), roundings=1)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["layer_norm", "dropout_add_layer_norm", "rms_norm"])
def test_parameters_of_a_narrower_dtype_are_widened(op, narrow):
    """As kernels take them, and as FSDP2 gathers them in 16 bits; their gradients have their dtype."""
    x = random(5, 7, dtype=torch.float32)
    calls = {
        "rms_norm": lambda *affine: rms_norm(x, 7, *affine),
        "layer_norm": lambda *affine: layer_norm(x, 7, *affine),
        "dropout_add_layer_norm": lambda *affine: dropout_add_layer_norm(x, x, 7, *affine)[0],
    }
    parameters = [random(7, dtype=narrow) for _ in range(1 if op == "rms_norm" else 2)]
    assert_same(calls[op](*parameters), calls[op](*(p.float() for p in parameters)), [x, *parameters], roundings=0)
    with pytest.raises(RuntimeError, match="dtype"):  # what torch says of wider ones
        layer_norm(x, 7, parameters[0].double(), parameters[0].double())
