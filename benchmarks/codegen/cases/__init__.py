"""Every configuration that the launchers can choose, for `python -m benchmarks.codegen`.

A function NAME_cases() yields pairs: the name of a configuration, which becomes NAME/configuration, and a function
without arguments that calls launchers on meta tensors such that they choose it.
"""

import torch
from torch import Tensor


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
