"""The one measure of closeness: the largest error against the largest value, in units of the dtype's rounding."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

Results = Tensor | Sequence[Tensor]


def assert_close(actual: Results, expected: Results, roundings: float = 100.0) -> None:
    """Compare shape, dtype and values of a tensor, or of each of several; no NaN is close to anything.

    The same formula in another order of operations differs by some tens of roundings at the sizes of these tests.
    """
    if not isinstance(actual, Tensor):
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, roundings)
        return
    assert isinstance(expected, Tensor)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if actual.numel() == 0:
        return
    if not actual.is_floating_point():
        assert torch.equal(actual, expected)
        return
    error = (actual.double() - expected.double()).abs().max().item()
    limit = roundings * torch.finfo(actual.dtype).eps * max(1.0, expected.double().abs().max().item())
    assert error <= limit, f"error {error:.3g}, allowed {limit:.3g}"  # false for NaN


def gradients(output: Results, inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return gradients of a fixed random combination of the outputs' elements; zeros where an input is not used."""
    outputs = [output] if isinstance(output, Tensor) else output
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    return list(torch.autograd.grad(outputs, list(inputs), directions, allow_unused=True, materialize_grads=True))


def assert_same(
    actual: Results,
    expected: Results,
    leaves: Iterable[Tensor],
    expected_leaves: Iterable[Tensor] | None = None,
    roundings: float = 100.0,
) -> None:
    """Compare outputs, and their gradients of the leaves; expected_leaves: what `expected` was made of instead."""
    leaves = list(leaves)
    assert_close(actual, expected, roundings)
    if not leaves:
        return
    expected_gradients = gradients(expected, leaves if expected_leaves is None else expected_leaves)
    assert_close(gradients(actual, leaves), expected_gradients, roundings)


def assert_formula(formula: Callable[..., Any], inputs: Sequence[Tensor | None], op: Callable[..., Any]) -> None:
    """Hold an op in fp64 and in fp32 to a formula in fp64: outputs, and gradients of all inputs that are not None."""
    rounded = [x if x is None else x.detach().float().double().requires_grad_() for x in inputs]
    exact = _outputs_and_gradients(formula, rounded)
    for dtype in (torch.float64, torch.float32):
        typed = [x if x is None else x.detach().to(dtype).requires_grad_() for x in rounded]
        assert_close(_outputs_and_gradients(op, typed), [x.detach().to(dtype) for x in exact])


def _outputs_and_gradients(op: Callable[..., Any], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    result = op(*inputs)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    return [*outputs, *gradients(outputs, [x for x in inputs if x is not None])]


def assert_derivatives(op: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Compare the first and the second derivative of an op with differences."""
    assert gradcheck(op, tuple(inputs))
    assert gradgradcheck(op, tuple(inputs))


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """Return a leaf of standard normal values that requires a gradient."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def assert_dropout_rate(dropped: Tensor, p: float) -> None:
    """Compare the number of dropped elements (bool) with a binomial distribution: within 5 deviations."""
    n = dropped.numel()
    assert abs(int(dropped.sum()) - n * p) < 5 * math.sqrt(n * p * (1 - p))
