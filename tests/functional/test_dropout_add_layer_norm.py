"""functional.dropout_add_layer_norm, and the dropout that all ops share."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fastformer.functional import dropout_add_layer_norm
from fastformer.functional.dropout import drop as dropout
from tests.support.closeness import assert_close, gradients, random


@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 7), (0, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_of_both_results(shape, affine, dtype):
    given = [random(*shape, dtype=dtype), random(*shape, dtype=dtype)]
    given += [random(shape[-1], dtype=dtype), random(shape[-1], dtype=dtype)] if affine else []
    norm, total = dropout_add_layer_norm(*given[:2], shape[-1], *given[2:], eps=1e-3)
    expected_total = given[0] + given[1]
    expected = F.layer_norm(expected_total, shape[-1:], *given[2:], eps=1e-3)
    assert_close(total, expected_total)
    assert_close(norm, expected)
    # Pre-norm layers use both results at once.
    for actual, wanted in zip(gradients(norm * total, given), gradients(expected * expected_total, given), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_first_and_second_derivative(p):
    def seeded(*inputs):
        torch.manual_seed(2)
        return dropout_add_layer_norm(*inputs[:2], 3, *inputs[2:], dropout_p=p)

    inputs = (random(2, 3), random(2, 3), random(3), random(3))
    assert gradcheck(seeded, inputs)
    assert gradgradcheck(seeded, inputs)


def test_dropout_touches_x_and_not_the_residual():
    x, residual = torch.full((200, 8), 3.0), random(200, 8, dtype=torch.float32)
    norm, total = dropout_add_layer_norm(x, residual, 8, dropout_p=0.4)
    change = (total - residual).round(decimals=3)
    assert set(change.flatten().tolist()) == {0.0, 5.0}
    assert_close(norm, F.layer_norm(total, (8,)))
    assert torch.equal(dropout_add_layer_norm(x, residual, 8, dropout_p=1.0)[1], residual)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residual": torch.zeros(3, 4)}, r"x and residual must have the same shape, not \[2, 4\] and \[3, 4\]"),
        ({"dropout_p": 2.0}, "dropout_p must be between 0 and 1, not 2.0"),
    ],
)
def test_bad_arguments(arguments, message):
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=message):
        dropout_add_layer_norm(**{"x": x, "residual": x, "normalized_shape": 4, **arguments})


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
