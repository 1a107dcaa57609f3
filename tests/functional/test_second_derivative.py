"""The second derivative of attention: by torch's own means where SDPA computes it."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastformer import functional

B, H, T, S, K = 2, 2, 2, 3, 2

RULES = {
    "all keys": {},
    "causal": {"causal": True},
    "a scale": {"scale": 0.3},
    "a bool mask": {"mask": torch.ones(T, S).tril(1).bool()},
    "lengths": {"key_lengths": torch.tensor([S, 1]), "query_lengths": torch.tensor([1, T])},
}


@pytest.mark.parametrize("heads", [H, 1])
@pytest.mark.parametrize("rules", RULES)
def test_by_differences_with_the_math_backend(rules, heads):
    shapes = (B, H, T, K), (B, heads, S, K), (B, heads, S, K)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda *x: functional.attention(*x, **RULES[rules]), inputs)
