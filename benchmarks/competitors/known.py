"""Names of the competitors, and the reason if this machine cannot run one."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Missing = Callable[[torch.device], str | None]  # why a competitor cannot run on a device, None if it can
NEEDS_GPU = "needs a CUDA device"


def _nothing(device: torch.device) -> str | None:
    return None


def _gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else NEEDS_GPU


def _packages(*names: str, gpu: bool = True, hopper: bool = False) -> Missing:
    """Require modules, a GPU, and compute capability 9.0 or higher."""

    def missing(device: torch.device) -> str | None:
        for name in names:
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed"
        reason = _gpu(device) if gpu or hopper else None
        if reason is None and hopper and (version := torch.cuda.get_device_capability(device)) < (9, 0):
            return f"needs compute capability 9.0, this GPU has {version[0]}.{version[1]}"
        return reason

    return missing


def _chunked_loss(device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    return None


COMPETITORS: dict[str, Missing] = {
    "eager": _nothing,  # PyTorch's ops in sequence
    "compile": _gpu,  # torch.compile of them; on a CPU Inductor compiles C++ for minutes
    "tutorial": _nothing,  # the tutorials' algorithm, written from its description
    "torch.nn": _nothing,
    "torch.nn-compile": _gpu,
    "sdpa": _nothing,  # scaled_dot_product_attention, whichever backend it takes
    "sdpa-cudnn": _gpu,
    "sdpa-flash": _nothing,
    "sdpa-efficient": _gpu,
    "sdpa-math": _nothing,
    "flex": _gpu,  # flex_attention, compiled, its block mask made beforehand
    "flex-per-batch": _gpu,  # its block mask made for each batch
    "varlen": _gpu,  # torch.nn.attention.varlen, unpadding and padding included
    "liger": _packages("liger_kernel"),
    "liger-fp32": _packages("liger_kernel"),  # gradients of weights added up in fp32
    "liger-cute": _packages("liger_kernel", "cutlass", hopper=True),  # LIGER_KERNEL_IMPL=cutedsl
    "liger-cute-sm90": _packages("liger_kernel", "cutlass", hopper=True),  # output projection and loss for Hopper
    "quack": _packages("quack", hopper=True),  # kernels in CuTe (quack-kernels)
    "torch-chunked": _chunked_loss,  # torch's linear_cross_entropy by chunks, from 2.13 on
    "flash-attn": _packages("flash_attn"),
    "xformers": _packages("xformers"),
    "transformers": _packages("transformers", gpu=False),
    "sentence-transformers": _packages("sentence_transformers", gpu=False),
    "ctranslate2": _packages("ctranslate2", gpu=False),  # from fastformer's export
    "own-lengths": _nothing,  # fastformer's attention, told of padding by lengths
    "no-graphs": _gpu,  # fastformer's steps without CUDA graphs
}


def compiled(function: Callable[..., Tensor], keeps: bool = False) -> Callable[..., Tensor]:
    """Compile a function for one shape. With `keeps`, backward keeps saved tensors, so that it can be timed alone."""
    import torch._dynamo
    import torch._functorch.config

    torch._functorch.config.donated_buffer = not keeps
    # Dynamo counts compilations by code object, which the cases of a file share; after 8 of them it runs eager code.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def require(name: str, device: torch.device) -> None:
    """Skip the case, with the reason, if the machine lacks a competitor."""
    reason = COMPETITORS[name](device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
