"""Fused implementations: op registration and autograd Functions around `fastformer_kernels`, one file an op.

None is part of this version, and `unsupported` says so: the door through which they will be reached.
"""

from torch import Tensor


def unsupported(op: str, x: Tensor) -> str | None:
    """Return why no fused kernel can run `op` on `x`, or None if one can."""
    return f"this version has no fused kernel for {op}"
