"""What people would use instead, by the names of `--competitor`, and whether this machine has it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

Reason = str | None
NEEDS_GPU = "needs a CUDA device"


@dataclass(frozen=True)
class Competitor:
    """One of them. `missing(device)` says what keeps it from running there, None if nothing does."""

    about: str
    missing: Callable[[torch.device], Reason] = lambda device: None


def _package(*names: str, gpu: bool = True, hopper: bool = False) -> Callable[[torch.device], Reason]:
    """All of these modules, a GPU, and one of compute capability 9.0 or higher."""

    def missing(device: torch.device) -> Reason:
        for name in names:
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed"
        reason = _gpu(device) if gpu or hopper else None
        if reason is None and hopper and (found := torch.cuda.get_device_capability(device)) < (9, 0):
            return f"needs compute capability 9.0, this GPU has {found[0]}.{found[1]}"
        return reason

    return missing


def _gpu(device: torch.device) -> Reason:
    return None if device.type == "cuda" else NEEDS_GPU


def _compiler(device: torch.device) -> Reason:
    # On a CPU, Inductor compiles C++ for minutes, and its code is not what is compared with.
    return _gpu(device)


def _chunked(device: torch.device) -> Reason:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no chunked linear_cross_entropy"
    return None


COMPETITORS = {
    "eager": Competitor("PyTorch's ops one after another"),
    "compile": Competitor("torch.compile of the same", _compiler),
    "tutorial": Competitor("the tutorials' algorithm, written from its description"),
    "torch.nn": Competitor("torch.nn's module"),
    "torch.nn-compile": Competitor("torch.compile of torch.nn's module", _compiler),
    "sdpa": Competitor("scaled_dot_product_attention, whichever backend it takes"),
    "sdpa-cudnn": Competitor("scaled_dot_product_attention by cuDNN", _gpu),
    "sdpa-flash": Competitor("scaled_dot_product_attention by FlashAttention"),
    "sdpa-efficient": Competitor("scaled_dot_product_attention, memory-efficient", _gpu),
    "sdpa-math": Competitor("scaled_dot_product_attention by plain ops"),
    "flex": Competitor("flex_attention, compiled, its block mask made beforehand", _compiler),
    "flex-per-batch": Competitor("flex_attention, compiled, its block mask made for each batch", _compiler),
    "varlen": Competitor("torch.nn.attention.varlen, unpadding and padding included", _gpu),
    "liger": Competitor("Liger-Kernel", _package("liger_kernel")),
    "liger-fp32": Competitor("Liger-Kernel, gradients of weights added up in fp32", _package("liger_kernel")),
    "liger-cute": Competitor(
        "Liger-Kernel, what LIGER_KERNEL_IMPL=cutedsl chooses", _package("liger_kernel", "cutlass", hopper=True)
    ),
    "liger-cute-sm90": Competitor(
        "Liger-Kernel's output projection and loss for Hopper", _package("liger_kernel", "cutlass", hopper=True)
    ),
    "quack": Competitor("quack, kernels in CuTe (quack-kernels)", _package("quack", hopper=True)),
    "torch-chunked": Competitor("torch's linear_cross_entropy by chunks, from 2.13 on", _chunked),
    "flash-attn": Competitor("the flash-attn package", _package("flash_attn")),
    "xformers": Competitor("xformers", _package("xformers")),
    "transformers": Competitor("Hugging Face transformers", _package("transformers", gpu=False)),
    "ctranslate2": Competitor("CTranslate2, from our export", _package("ctranslate2", gpu=False)),
    "own-lengths": Competitor("our own attention, told of padding by lengths"),
    "no-graphs": Competitor("our own steps without CUDA graphs", _gpu),
}


def compiled(function: Callable[..., Tensor], keeps: bool = False) -> Callable[..., Tensor]:
    """torch.compile for one shape; with `keeps`, its backward keeps what was saved, so that it can be timed alone."""
    import torch._dynamo
    import torch._functorch.config

    torch._functorch.config.donated_buffer = not keeps
    # Dynamo counts compilations by code object, which the cases of a file share; after 8 of them it runs eager code.
    torch._dynamo.reset()
    done: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    return done


def require(name: str, device: torch.device) -> Competitor:
    """Take a competitor, or skip the case with what it misses."""
    chosen = COMPETITORS[name]
    reason = chosen.missing(device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return chosen


def chosen(text: str) -> set[str]:
    """The competitors that `--competitor` names, separated by commas.

    Raises:
        ValueError: one of them is unknown.
    """
    names = {name.strip() for name in text.split(",")}
    unknown = sorted(names - COMPETITORS.keys())
    if unknown:
        raise ValueError(f"--competitor: unknown competitor {unknown[0]!r}; known: {', '.join(COMPETITORS)}")
    return names
