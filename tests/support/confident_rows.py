"""Rows of logits with losses from 12 down to 2e-35, and these losses in fp64."""

import torch
from torch import Tensor


def confident_rows(smoothing: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x `[M, 2]` and weight `[3, 2]` in fp32, target `[M]` and the losses in fp64; the last row is ignored.

    The logits are multiples of 1/32: products and differences are exact in fp32, so that what is lost is the loss's.
    """
    peaks, margins = (
        torch.tensor([100.0, 1000.0, -50.0, 0.125]),
        torch.tensor([-11.0, 0.0, 0.125, 1.0, 11.0, 15.0, 80.0]),
    )
    x, weight = torch.cartesian_prod(peaks, margins), torch.tensor([[1.0, 0.0], [1.0, -1.0], [1.0, -1.25]])
    differences = (x.double() @ weight.double().mT)[:, 1:] - x[:, :1].double()
    losses = differences.exp().sum(1).log1p() - smoothing * differences.sum(1) / 3
    target = torch.tensor([0] * len(x) + [-100])
    return torch.cat([x, x[:1]]), weight, target, torch.cat([losses, losses.new_zeros(1)])
