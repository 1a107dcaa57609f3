"""The one measure of closeness: the largest error against the largest value, in units of the dtype's rounding."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def assert_close(actual: Tensor, expected: Tensor, roundings: float = 100.0) -> None:
    """Compare shape, dtype and values; no NaN is close to anything.

    The same formula in another order of operations differs by some tens of roundings at the sizes of these tests.
    """
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


def gradients(output: Tensor | Sequence[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random combination of the outputs' elements; zeros where an input plays no part."""
    outputs = [output] if isinstance(output, Tensor) else output
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    return list(torch.autograd.grad(outputs, list(inputs), directions, allow_unused=True, materialize_grads=True))


def random(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """Standard normal values, a leaf that wants a gradient."""
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)
