"""Choose the implementation of a call: the fused kernel, torch's SDPA, or the reference. No other module chooses."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata

import torch
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl

from fastformer.backend import CHOICES, BackendError, get_backend, process
from fastformer.functional.attention.fused import decodes
from fastformer.functional.attention.fused import limit as attention_limit
from fastformer.functional.attention.reference import only_causal
from fastformer.functional.attention.rules import AttentionRules
from fastformer.functional.preferences import SIXTEEN_BITS, Use, why_sdpa
from fastformer.host.devices import product_dtype
from fastformer.modes import compiling, forward_ad, function_modes, functorch_level, in_vmap
from fastformer_kernels.host.architecture import EXACT_ON_TENSOR_CORES, WITHOUT_TF32, architecture_of, target_of

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
_COMMON_HEAD_SIZE = 64
_WITHOUT_KERNELS_ON_CPU = ("auto", "reference")


def _fault_of_interpreter() -> str | None:
    """Return why Triton's interpreter cannot run here, or None: Triton 3.6 uses a conversion that NumPy 2.4 forbids."""
    try:
        triton, numpy = ([int(n) for n in metadata.version(name).split(".")[:2]] for name in ("triton", "numpy"))
    except (metadata.PackageNotFoundError, ValueError):  # custom builds
        return None
    if triton > [3, 6] or numpy < [2, 4]:
        return None
    return "needs NumPy below 2.4 in the interpreter of Triton 3.6 (or Triton 3.7)"


def _fault_of_launchers() -> str | None:
    """Return why Triton cannot launch kernels here, or None: it builds its launchers with a C compiler."""
    if sys.platform != "linux" or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "needs a C compiler, with which Triton builds launchers: install gcc or clang, or set CC to one"


FAULT_OF_LAUNCHERS = _fault_of_launchers()
_FAULT_OF_INTERPRETER = _fault_of_interpreter() if _TRITON and _INTERPRETED else None


def unsupported(op: str, x: Tensor) -> str | None:
    """Return why no fused kernel can run `op` on a tensor like `x`, or None if one can.

    Triton's interpreter runs for backend "triton" only; "auto" never takes it.
    """
    if x.is_cpu and not _INTERPRETED:
        return f"{op} needs a GPU, and the tensor is on the CPU (TRITON_INTERPRET=1 runs kernels there, slowly)"
    if not _TRITON:
        return f"{op} needs Triton, which is not installed ({INSTALL_TRITON})"
    if x.dtype not in DTYPES:
        return f"{op} takes float32, float16 and bfloat16, not {str(x.dtype).removeprefix('torch.')}"
    if x.is_cpu:
        if process.backend != "triton":
            return f"{op} is on the CPU, where the interpreter runs only for backend 'triton'"
        if _FAULT_OF_INTERPRETER is not None:
            return f"{op} {_FAULT_OF_INTERPRETER}"
    elif not x.is_cuda:
        return f"{op} needs an NVIDIA or AMD GPU, and the tensor is on {x.device.type}"
    elif architecture_of(target := target_of(x.get_device())) is None:
        return f"{op} needs sm_80 or newer, gfx90a, gfx942, gfx950, gfx11 or gfx12, not {target}"
    elif target.startswith("gfx") and process.backend != "triton":
        return f"{op} is not measured on this GPU, {target}; backend 'triton' runs the kernels"
    elif _INTERPRETED and process.backend != "triton":
        return f"{op} would run in the interpreter (TRITON_INTERPRET=1), which runs only for backend 'triton'"
    elif FAULT_OF_LAUNCHERS is not None:
        return f"{op} {FAULT_OF_LAUNCHERS}"
    if x.is_nested or (type(x) is not Tensor and hasattr(x, "device_mesh")):
        return f"{op} has no rule for nested tensors and DTensors"
    if functorch_level() is not None and in_vmap():
        return f"{op} has no rule for torch.func.vmap"
    if forward_ad._current_level >= 0:
        return f"{op} has no forward-mode derivative"
    return None


def why_sdpa_takes(q: Tensor, k: Tensor, v: Tensor, rules: AttentionRules, keys: int) -> str | None:
    """Return why "auto" passes an attention call that the kernels support to SDPA, or None if the kernels run it.

    SDPA gets plain calls (`preferences`). In exact fp32 it gets calls with masks and lengths too, where it multiplies
    on tensor cores and the kernels do not. A flash implementation that the user activated in torch gets all plain calls
    of 16 bits, because no row of the table compares with it.

    q, k, v: dense `[B, H, L, K]`, or packed `[L, H, K]`; keys: the number of keys of a sequence.
    """
    if any(x is not None for x in (rules.window, rules.softcap, rules.distance_bias, rules.sinks)):
        return None
    if torch.are_deterministic_algorithms_enabled() or (rules.mask is not None and rules.mask.requires_grad):
        return None
    dtype = product_dtype(q)
    is_plain = all(x is None for x in rules.tensors) and (not rules.causal or only_causal(rules))
    head_size = max(q.shape[-1], v.shape[-1])
    if not is_plain and not on_plain_cores(q, head_size):
        return None
    # SDPA has no fused backend for grouped heads in fp32, and none that drops all weights.
    if keys == 0 or rules.dropout_p == 1.0 or (dtype == torch.float32 and q.shape[1] != k.shape[1]):
        return None
    if dtype in SIXTEEN_BITS and (implementation := current_flash_attention_impl()) is not None:
        return f"the flash implementation {implementation} is activated in torch"
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    use: Use = "training" if training else "decoding" if decodes(q, k, v) else "inference"
    return why_sdpa(architecture_of(target_of(q.get_device())), dtype, use, head_size, keys)


def on_plain_cores(q: Tensor, head_size: int) -> bool:
    """Return whether attention's kernels multiply without tensor cores in forward or backward; False while compiling.

    They do in exact fp32, except for heads up to `EXACT_ON_TENSOR_CORES`, whose products are three of tf32.
    """
    if compiling() or product_dtype(q) != torch.float32:
        return False
    architecture = architecture_of(target_of(q.get_device())) or ""
    if torch.backends.cuda.matmul.fp32_precision == "tf32" and architecture not in WITHOUT_TF32:
        return False
    return head_size > EXACT_ON_TENSOR_CORES.get(architecture, 0)


def runs_fused(
    op: str,
    x: Tensor,
    limit: Callable[[], str | None] | None = None,
    slower: Callable[[], str | None] | None = None,
) -> bool:
    """Return whether the fused kernel runs one call.

    Args:
        op: its name in OPS.
        x: the tensor whose device and dtype decide.
        limit: returns why the kernel does not support the arguments, or None.
        slower: returns why "auto" does not take the kernel although it supports the call, or None.

    Raises:
        BackendError: backend "triton" was requested and cannot run this call.
    """
    choice = process.backend  # `get_backend` without its calls, because every op runs this
    if choice not in CHOICES:
        choice = get_backend()  # raises, with the choices
    if choice == "reference" or (choice == "auto" and x.is_cpu):  # decided without the reason
        return False
    reason = unsupported(op, x)
    if reason is None and limit is not None:
        reason = limit()
    if reason is not None and choice == "triton":
        raise BackendError(f"backend 'triton' was asked for, but {reason}")
    if reason is None and slower is not None and choice == "auto":
        reason = slower()
    return reason is None


def is_torchs(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Return whether an op can call torch's at once: plain tensors of one dtype on a CPU.

    This takes 0.5 us, all other checks 1.6. torch.nn.LayerNorm of 14 tokens takes 6.5 us, 0.7 of them in the Python
    function around torch's op, which the caller leaves out.
    """
    try:
        dtype = x.dtype
        return (
            type(x) is Tensor
            and x.is_cpu
            and (weight is None or (weight.is_cpu and weight.dtype is dtype))
            and (bias is None or (bias.is_cpu and bias.dtype is dtype))
            and process.backend in _WITHOUT_KERNELS_ON_CPU
            and not function_modes()
        )
    except AttributeError:  # not tensors
        return False


def check_backend(x: Tensor) -> None:
    """Raise the error of an op that the requested backend cannot run, before work begins.

    x: `[..., K]`, like an input of attention: its device, dtype and head size K decide.
    """
    for op in OPS:
        runs_fused(op, x, lambda: attention_limit(x, x, x))


def explain(subject: nn.Module | Tensor) -> str:
    """Return which implementation would run each op on a tensor, or on a module's first parameter, and why.

    One line an op: `layer_norm: reference (…reason…)`. Where torch's SDPA takes a part of an op's calls, the line says
    so: `attention: triton; sdpa for plain calls (…reason…)`.
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
            lines.append(f"{op}: triton{_calls_of_sdpa(op, x) if choice == 'auto' else ''}")
        elif choice == "triton":
            lines.append(f"{op}: raises ({reason})")
        else:
            lines.append(f"{op}: reference ({reason})")
    return "\n".join(lines)


def _calls_of_sdpa(op: str, x: Tensor) -> str:
    """Return which calls of an op SDPA takes under "auto", and why; the head size is known if x is `[B, H, L, K]`."""
    calls = {"attention": "plain calls", "packed_attention": "plain calls of sequences of one length"}.get(op)
    if calls is None:
        return ""
    head_size = x.shape[-1] if x.dim() == 4 else _COMMON_HEAD_SIZE
    if on_plain_cores(x, head_size):
        calls = "calls without window, softcap, bias and sinks"
    reason = why_sdpa(architecture_of(target_of(x.get_device())), product_dtype(x), "training", head_size, 1024)
    return "" if reason is None else f"; sdpa for {calls} ({reason})"
