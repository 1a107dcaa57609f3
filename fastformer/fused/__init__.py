"""Fused implementations: op registration and autograd Functions around `fastformer_kernels`, one file an op.

`unsupported` says whether they can run at all here; what only one op cannot do, its own file says.
"""

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from fastformer.backend import get_backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRITON = importlib.util.find_spec("triton") is not None
# Triton's own switch, which it reads when kernels are defined: they then run on CPU tensors, and very slowly.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
_SMALLEST_CAPABILITY = (8, 0)


def _inside_vmap() -> bool:
    """Whether a vmap is active; any tensor of the op may then be batched, be it a weight alone."""
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is None:
        return False
    return any(level.key() == functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def unsupported(op: str, x: Tensor) -> str | None:
    """Return why no fused kernel can run `op` on a tensor like `x`, or None if one can.

    Triton's interpreter counts only where backend "triton" is asked for: "auto" never takes it.
    """
    if not _TRITON:
        return f"{op} needs Triton, which is not installed (on Linux: pip install 'fastformer[triton]')"
    if x.dtype not in DTYPES:
        return f"{op} takes float32, float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if x.is_cpu:
        if not _INTERPRETED:
            return f"{op} needs a GPU, and the tensor is on the CPU (TRITON_INTERPRET=1 runs kernels there, slowly)"
        if get_backend() != "triton":
            return f"{op} is on the CPU, where the interpreter runs only for backend 'triton'"
    elif not x.is_cuda or torch.version.hip is not None:
        return f"{op} needs an NVIDIA GPU, and the tensor is on {x.device.type}"
    elif (found := _capability(x.get_device())) < _SMALLEST_CAPABILITY:
        return f"{op} needs compute capability 8.0 or newer, and this GPU has {found[0]}.{found[1]}"
    if _inside_vmap():
        return f"{op} has no rule for torch.func.vmap"
    if torch.autograd.forward_ad._current_level >= 0:
        return f"{op} has no forward-mode derivative"
    return None
