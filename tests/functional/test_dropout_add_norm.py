"""functional.dropout_add_layer_norm, dropout_add_rms_norm, and the dropout that all ops share."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fastformer.functional import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm, rms_norm
from fastformer.functional.dropout import drop as dropout
from tests.support.closeness import assert_close, gradients, random


def centred(s, weight, bias, eps):
    """Layer norm (Ba et al. 2016, equation 3)."""
    deviation = s - s.mean(-1, keepdim=True)
    normal = deviation / (deviation.square().mean(-1, keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * weight + bias


def divided(s, weight, eps):
    """RMS norm (Zhang and Sennrich 2019, equation 4)."""
    normal = s / (s.square().mean(-1, keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * weight


# The op, the formula of its norm, that norm as an op, and how many parameters they have.
STEPS = pytest.mark.parametrize(
    ("op", "formula", "norm", "parameters"),
    [(dropout_add_layer_norm, centred, layer_norm, 2), (dropout_add_rms_norm, divided, rms_norm, 1)],
    ids=["layer norm", "RMS norm"],
)
OPS = pytest.mark.parametrize("op", [dropout_add_layer_norm, dropout_add_rms_norm])


@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 7), (0, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@STEPS
def test_values_and_gradients_of_both_results(op, formula, norm, parameters, shape, affine, dtype):
    rows = [random(*shape, dtype=dtype), random(*shape, dtype=dtype)]
    affine = [random(shape[-1], dtype=dtype) for _ in range(parameters)] if affine else []
    given, wide = [*rows, *affine], [t.detach().double().requires_grad_() for t in (*rows, *affine)]
    normed, total = op(*rows, shape[-1], *affine, eps=1e-3)
    expected_total = wide[1] + wide[0]
    expected = formula(expected_total, *(wide[2:] or [None] * parameters), 1e-3)
    assert_close(total, expected_total.to(dtype))
    assert_close(normed, expected.to(dtype))
    # Pre-norm layers use both results at once.
    found = gradients(normed * total, given)
    for actual, wanted in zip(found, gradients(expected * expected_total, wide), strict=True):
        assert_close(actual, wanted.to(dtype))


@STEPS
def test_the_norm_is_that_of_the_total(op, formula, norm, parameters):
    """With several dimensions, an epsilon of torch's choice, and a dtype of its own, rounded once."""
    x, residual = random(2, 3, 5, dtype=torch.float32), random(2, 3, 5, dtype=torch.float32)
    affine = [random(3, 5, dtype=torch.float32) for _ in range(parameters)]
    for dtype in (None, torch.bfloat16):
        normed, total = op(x * 1e-4, residual * 1e-4, (3, 5), *affine, dtype=dtype)
        assert total.dtype == torch.float32
        assert normed.dtype == (dtype or torch.float32)
        assert torch.equal(total, residual * 1e-4 + x * 1e-4)
        assert torch.equal(normed, norm(total, (3, 5), *affine, dtype=dtype))


@pytest.mark.parametrize("p", [0.0, 0.5])
@STEPS
def test_first_and_second_derivative(op, formula, norm, parameters, p):
    def seeded(*inputs):
        torch.manual_seed(2)
        return op(*inputs[:2], 3, *inputs[2:], dropout_p=p)

    inputs = (random(2, 3), random(2, 3), *(random(3) for _ in range(parameters)))
    assert gradcheck(seeded, inputs)
    assert gradgradcheck(seeded, inputs)


@STEPS
def test_dropout_touches_x_and_not_the_residual(op, formula, norm, parameters):
    x, residual = torch.full((200, 8), 3.0), random(200, 8, dtype=torch.float32)
    normed, total = op(x, residual, 8, dropout_p=0.4)
    change = (total - residual).round(decimals=3)
    assert set(change.flatten().tolist()) == {0.0, 5.0}
    assert_close(normed, norm(total, 8))
    assert torch.equal(op(x, residual, 8, dropout_p=1.0)[1], residual)


def test_both_steps_drop_the_same_of_a_seed():
    x, residual = torch.full((20, 8), 3.0), random(20, 8, dtype=torch.float32)
    totals = []
    for op in (dropout_add_layer_norm, dropout_add_rms_norm):
        torch.manual_seed(3)
        totals.append(op(x, residual, 8, dropout_p=0.4)[1])
    assert torch.equal(*totals)


@OPS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residual": torch.zeros(3, 4)}, r"x and residual must have the same shape, not \[2, 4\] and \[3, 4\]"),
        ({"dropout_p": 2.0}, "dropout_p must be between 0 and 1, not 2.0"),
    ],
)
def test_bad_arguments(op, arguments, message):
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=message):
        op(**{"x": x, "residual": x, "normalized_shape": 4, **arguments})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_dropout_rate_is_binomial_and_its_scale_unbiased(p, dtype):
    n = 200_003  # no multiple of the four decisions in one random number
    out = dropout(torch.ones(n, dtype=dtype), p)
    kept = int((out != 0).sum())
    assert abs(kept - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    assert out.unique().numel() == 2
    # p is quantised to 2^-16.
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=max(2**-16 / (1 - p), torch.finfo(dtype).eps))


def test_dropout_decisions_are_independent():
    """Of neighbours, of elements one random number apart, and of the same element in the next call."""
    n = 1 << 17
    keep = (dropout(torch.ones(n), 0.5) != 0).double() - 0.5
    following = (dropout(torch.ones(n), 0.5) != 0).double() - 0.5
    for other in (*(keep.roll(shift) for shift in (1, 2, 3, 4)), following):
        assert abs((keep * other).mean().item()) < 5 * 0.25 / math.sqrt(n)


def test_dropout_repeats_under_a_seed_and_lets_everything_or_nothing_through():
    x = random(7, 5)
    torch.manual_seed(1)
    first = dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(dropout(x, 0.5), first)
    assert torch.equal(dropout(x, 0.0), x)
    assert not dropout(x, 1.0).any()
    assert dropout(x[:0], 0.5).shape == (0, 5)
    assert dropout(x.mT, 0.5).shape == (5, 7)


def test_dropout_under_activation_checkpointing_uses_one_mask():
    from torch.utils.checkpoint import checkpoint

    x = random(6, 8)

    def run(checkpointed):
        torch.manual_seed(4)
        step = lambda x: dropout(x, 0.5) ** 2  # noqa: E731
        return gradients(checkpoint(step, x, use_reentrant=False) if checkpointed else step(x), [x])[0]

    assert torch.equal(run(True), run(False))
