"""Who runs a call: the fused kernel or the reference. The only place where an implementation is chosen."""

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata

import torch
from torch import Tensor, nn

from fastformer.backend import CHOICES, BackendError, get_backend, process, thread
from fastformer.functional.attention.fused import limit as attention_limit
from fastformer.modes import batched, forward_ad, function_modes, functorch_level

OPS = (
    "attention",
    "attention_with_weights",
    "packed_attention",
    "layer_norm",
    "rms_norm",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "feed_forward",
    "embedding",
    "rotary",
    "linear_cross_entropy",
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRITON = importlib.util.find_spec("triton") is not None
INSTALL_TRITON = (
    "pip install 'fastformer[triton]'" if sys.platform in ("linux", "win32") else "there is none for this system"
)
# Triton's own switch, which it reads when kernels are defined: they then run on CPU tensors, and very slowly.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
_SMALLEST_CAPABILITY = (8, 0)
_WITHOUT_KERNELS_ON_CPU = ("auto", "reference")


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _fault_of_interpreter() -> str | None:
    """Return why Triton's interpreter cannot run here: that of 3.6 makes a number of an array, as NumPy 2.4 forbids."""
    try:
        triton, numpy = ([int(n) for n in metadata.version(name).split(".")[:2]] for name in ("triton", "numpy"))
    except (metadata.PackageNotFoundError, ValueError):  # builds of somebody's own
        return None
    if triton > [3, 6] or numpy < [2, 4]:
        return None
    return "needs NumPy below 2.4 in the interpreter of Triton 3.6 (or Triton 3.7)"


_FAULT_OF_INTERPRETER = _fault_of_interpreter() if _TRITON and _INTERPRETED else None


def unsupported(op: str, x: Tensor) -> str | None:
    """Return why no fused kernel can run `op` on a tensor like `x`, or None if one can.

    Triton's interpreter counts only where backend "triton" is asked for: "auto" never takes it.
    """
    if not _TRITON:
        return f"{op} needs Triton, which is not installed ({INSTALL_TRITON})"
    if x.dtype not in DTYPES:
        return f"{op} takes float32, float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if x.is_cpu:
        if not _INTERPRETED:
            return f"{op} needs a GPU, and the tensor is on the CPU (TRITON_INTERPRET=1 runs kernels there, slowly)"
        if (thread.backend or process.backend) != "triton":
            return f"{op} is on the CPU, where the interpreter runs only for backend 'triton'"
        if _FAULT_OF_INTERPRETER is not None:
            return f"{op} {_FAULT_OF_INTERPRETER}"
    elif not x.is_cuda or torch.version.hip is not None:
        return f"{op} needs an NVIDIA GPU, and the tensor is on {x.device.type}"
    elif (found := _capability(x.get_device())) < _SMALLEST_CAPABILITY:
        return f"{op} needs compute capability 8.0 or newer, and this GPU has {found[0]}.{found[1]}"
    if functorch_level() is not None and batched():
        return f"{op} has no rule for torch.func.vmap"
    if forward_ad._current_level >= 0:
        return f"{op} has no forward-mode derivative"
    return None


def runs_fused(op: str, x: Tensor, limit: Callable[[], str | None] | None = None) -> bool:
    """Choose the implementation of one call: whether the fused kernel takes it.

    Args:
        op: its name in OPS.
        x: the tensor that decides.
        limit: says why this call is beyond the kernel, if its arguments are.

    Raises:
        BackendError: backend "triton" was asked for and cannot run this.
    """
    choice = thread.backend or process.backend  # as `get_backend` has it, without its calls: each op asks
    if choice not in CHOICES:
        choice = get_backend()  # which raises, with the choices
    if choice == "reference" or (choice == "auto" and x.is_cpu):  # the latter without asking why
        return False
    reason = unsupported(op, x)
    if reason is None and limit is not None:
        reason = limit()
    if reason is not None and choice == "triton":
        raise BackendError(f"backend 'triton' was asked for, but {reason}")
    return reason is None


def is_torchs(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Whether a norm is torch's op on a CPU and nothing else.

    Asked first, since it takes 0.5 us and all the other questions 1.6: torch.nn.LayerNorm of 14 tokens takes 6.5, of
    which torch's function around its op has 0.7. What it does not recognise goes the way of all.
    """
    try:
        dtype = x.dtype
        return (
            type(x) is Tensor
            and x.is_cpu
            and (weight is None or (weight.is_cpu and weight.dtype is dtype))
            and (bias is None or (bias.is_cpu and bias.dtype is dtype))
            and (thread.backend or process.backend) in _WITHOUT_KERNELS_ON_CPU
            and not function_modes()
        )
    except AttributeError:  # no tensors
        return False


def check_backend(x: Tensor) -> None:
    """Raise what the first call of any op would, so that nothing is begun that a backend could never do.

    Args:
        x: `[..., K]` as attention would see it: its device, its dtype and its head size K count.

    Raises:
        BackendError: backend "triton" was asked for and cannot run an op.
        ValueError: the environment variable names no backend.
    """
    for op in OPS:
        runs_fused(op, x, lambda: attention_limit(x, x, x))


def explain(subject: nn.Module | Tensor) -> str:
    """Say which implementation would run each op on a tensor, or on a module's parameters, and why.

    Args:
        subject: a tensor, or a module (its first parameter stands for it).

    Returns:
        One line an op: `layer_norm: reference (…reason…)`.

    Raises:
        TypeError: subject is neither.
    """
    if isinstance(subject, nn.Module):
        x = next(subject.parameters(), torch.empty(0))
    elif isinstance(subject, Tensor):
        x = subject
    else:
        raise TypeError(f"subject must be a module or a tensor, not {type(subject).__name__}")
    choice = get_backend()
    lines = []
    for op in OPS:
        reason = "chosen" if choice == "reference" else unsupported(op, x)
        if reason is None:
            lines.append(f"{op}: triton")
        elif choice == "triton":
            lines.append(f"{op}: raises ({reason})")
        else:
            lines.append(f"{op}: reference ({reason})")
    return "\n".join(lines)
