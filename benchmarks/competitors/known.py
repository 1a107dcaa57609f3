"""Names of the competitors, and the reason if this machine cannot run one."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

NEEDS_GPU = "needs a CUDA device"


class Needs(NamedTuple):
    """Requirements of a competitor; `hopper`: compute capability 9.0 or higher."""

    packages: tuple[str, ...] = ()
    gpu: bool = False
    hopper: bool = False


_CUTE = Needs(("liger_kernel", "cutlass"), gpu=True, hopper=True)
COMPETITORS: dict[str, Needs] = {
    "eager": Needs(),  # PyTorch's ops in sequence
    "compile": Needs(gpu=True),  # torch.compile of them; on a CPU Inductor compiles C++ for minutes
    "tutorial": Needs(),  # the tutorials' algorithm, written from its description
    "torch.nn": Needs(),
    "torch.nn-compile": Needs(gpu=True),
    "sdpa": Needs(),  # scaled_dot_product_attention, whichever backend it takes
    "sdpa-cudnn": Needs(gpu=True),
    "sdpa-flash": Needs(),
    "sdpa-efficient": Needs(gpu=True),
    "sdpa-math": Needs(),
    "flex": Needs(gpu=True),  # flex_attention, compiled, its block mask made beforehand
    "flex-per-batch": Needs(gpu=True),  # its block mask made for each batch
    "varlen": Needs(gpu=True),  # torch.nn.attention.varlen, unpadding and padding included
    "liger": Needs(("liger_kernel",), gpu=True),
    "liger-fp32": Needs(("liger_kernel",), gpu=True),  # gradients of weights added up in fp32
    "liger-cute": _CUTE,  # LIGER_KERNEL_IMPL=cutedsl
    "liger-cute-sm90": _CUTE,  # output projection and loss for Hopper
    "quack": Needs(("quack",), gpu=True, hopper=True),  # kernels in CuTe (quack-kernels)
    "torch-chunked": Needs(),  # torch's linear_cross_entropy by chunks, from 2.13 on
    "flash-attn": Needs(("flash_attn",), gpu=True),
    "xformers": Needs(("xformers",), gpu=True),
    "transformers": Needs(("transformers",)),
    "sentence-transformers": Needs(("sentence_transformers",)),
    "ctranslate2": Needs(("ctranslate2",)),  # from fastformer's export
    "own-lengths": Needs(),  # fastformer's attention with lengths
    "no-graphs": Needs(gpu=True),  # fastformer's steps without CUDA graphs
}


def missing(name: str, device: torch.device) -> str | None:
    """Return the reason why a competitor cannot run on a device, or None."""
    packages, gpu, hopper = COMPETITORS[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if gpu and device.type != "cuda":
        return NEEDS_GPU
    if hopper and (version := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"needs compute capability 9.0, this GPU has {version[0]}.{version[1]}"
    if name == "torch-chunked" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    return None


def require(name: str, device: torch.device) -> None:
    """Skip the case, with the reason, if the machine lacks a competitor."""
    if reason := missing(name, device):
        pytest.skip(f"{name}: {reason}")


def compiled(function: Callable[..., Tensor], keeps: bool = False) -> Callable[..., Tensor]:
    """Compile a function for one shape. With `keeps`, backward keeps saved tensors, so that it can be timed alone."""
    import torch._dynamo
    import torch._functorch.config

    torch._functorch.config.donated_buffer = not keeps
    # Dynamo counts compilations by code object, which the cases of a file share; after 8 of them it runs eager code.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)
