"""What every launcher needs on the host: the device guard, the facts of the device, and the options of all launches."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Fused multiply-add, which Triton 3.10 turns off unless asked for; every version from 3.6 on takes the option.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


class Device(NamedTuple):
    """What tile sizes and grids depend on."""

    capability: int  # 90 for sm_90
    multiprocessors: int
    shared_memory: int  # bytes that one block can get


# Where no GPU is asked: the interpreter, and meta tensors; `benchmarks.codegen` puts other GPUs here. It is an H200's.
assumed = Device(90, 132, 227 << 10)


@cache
def _properties(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device(found.major * 10 + found.minor, found.multi_processor_count, found.shared_memory_per_block_optin)


def device_of(x: Tensor) -> Device:
    """Return the facts of the GPU that `x` is on."""
    return _properties(x.get_device()) if x.is_cuda else assumed


def has_small_memory(x: Tensor) -> bool:
    """Return whether a block gets the 99 KiB of shared memory of desktop GPUs; it is 163 and up elsewhere."""
    return device_of(x).shared_memory < 160 << 10


def guard(x: Tensor) -> Any:
    """Make the device of `x` the current one inside a `with` block; does nothing for a tensor on no GPU."""
    return torch.cuda.device_of(x)


def precision(x: Tensor) -> str:
    """Return the input precision of `tl.dot` for tensors like `x`: that of torch's own matrix products."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def power_of_two(n: int, at_least: int = 1) -> int:
    """Return the smallest power of two that is not below `n` or `at_least`."""
    return max(1 << max(n - 1, 0).bit_length(), at_least)


def inner_contiguous(x: Tensor) -> Tensor:
    """Return `x`, copied only if neighbours of its last dimension are not neighbours in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
