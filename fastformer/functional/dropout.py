"""Dropout by itself, in plain PyTorch: it needs no kernel, because the other ops include their dropout.

It draws from torch's generators. On a CPU it draws 16 random bits an element, because torch's Bernoulli sampling takes
as long as the matrix product beside it (docs/kernels/shared.md). The keep probability is a multiple of 1/65536, and the
scale is the inverse of that multiple.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.host.devices import check_probability, check_tensors
from fastformer.modes import compiling, in_torch_func, tracing_state

_LEVELS = 1 << 16
# Elements up to which torch's one op is faster, forward and backward: 56 against 74 us for 4,096, 138 against 108 for
# 16,384, one core.
_FEW = 8192


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p); no change where p is 0."""
    check_tensors(("x",), x)
    check_probability("p", p)
    return drop(x, p)


def drop(x: Tensor, p: float) -> Tensor:
    """Apply `dropout` without its checks, for the references of the other ops."""
    if p == 0.0:
        return x
    # vmap may require other random numbers in each row, which bits drawn here do not have; a trace supports neither the
    # view of bits nor the number of elements.
    if compiling() or tracing_state() is not None or x.device.type != "cpu" or p == 1.0:
        return F.dropout(x, p)
    if x.numel() <= _FEW or in_torch_func():
        return F.dropout(x, p)
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    # All 64 bits are random: random_() without bounds leaves the sign bit 0.
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    keep = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - _LEVELS // 2
    return x * keep.to(x.dtype).mul_(_LEVELS / (_LEVELS - dropped))
