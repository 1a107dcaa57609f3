"""Who is looking: every question to torch about compilation, traces, transforms, captures and profilers.

A program that is compiled, exported, traced or captured is not run for the values at hand: what would be decided by
these would be wrong for the next. A tensor inside `torch.func.vmap` stands for many. And a mode, a transform or a
profiler wants to see ops that would otherwise go past the dispatcher.

Nothing else names `torch._C` for that. What is asked at every call of an op is torch's own function under a name of
ours, because a function of ours around it would cost the host as much again.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad as forward_ad

compiling = torch.compiler.is_compiling  # Dynamo or export reads this very line
exporting = torch.compiler.is_exporting  # torch.export, so ONNX too: one program for all batches, compiling() as well
functorch_level = torch._C._functorch.maybe_current_level  # None outside torch.func
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many TorchDispatchModes are active
function_modes = torch._C._len_torch_function_stack  # likewise TorchFunctionModes
without_subclasses = torch._C.DisableTorchFunctionSubclass  # a context in which subclasses of Tensor are plain tensors
tracing_state = torch._C._get_tracing_state  # None outside torch.jit.trace
profiling = torch._C._autograd._profiler_enabled
current_node = torch._C._current_autograd_node  # of autograd, that is run or whose hook is
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # None where saved tensors are kept as such


def autocast_on_gpu_has(op: str) -> bool:
    """Whether autocast on a GPU has a rule for `aten::OP`, which is another thing than to leave it alone."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")


def watched() -> bool:
    """Whether anybody sees the single ops that run, or needs a rule for each: one op for several is another then."""
    return (
        compiling()
        or dispatch_modes() > 0
        or functorch_level() is not None
        or tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def transformed() -> bool:
    """Whether torch.func is at work; nobody can tell while compiling."""
    return not compiling() and functorch_level() is not None


def batched() -> bool:
    """Whether a vmap is active; any tensor of an op may then stand for many, be it a weight alone."""
    return _has_level(torch._C._functorch.TransformType.Vmap)


def _has_level(kind: Any) -> bool:
    return any(level.key() == kind for level in torch._C._functorch.get_interpreter_stack() or ())


def stands_for_many(x: Tensor) -> bool:
    """Whether x is one of many to vmap, be it inside other transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def recorded() -> bool:
    """Whether a program is made of what runs, by torch.compile, export, a trace or make_fx."""
    return compiling() or tracing_state() is not None or (dispatch_modes() > 0 and _proxy_mode() is not None)


def _proxy_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def functionalised() -> bool:
    """Whether torch.func.functionalize is at work, whose tensors have no memory, and which knows no Function."""
    return transformed() and _has_level(torch._C._functorch.TransformType.Functionalize)


def capturing(x: Tensor) -> bool:
    """Whether what runs on x's device is captured for a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def readable(x: Tensor) -> bool:
    """Whether a tensor has values to look at, where that waits for no device."""
    return x.is_cpu and x.numel() > 0 and has_values(x)


def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor, on whatever device, may decide what runs: they are those of this batch."""
    if compiling() or tracing_state() is not None or x.is_meta or isinstance(x, FakeTensor):
        return False
    if dispatch_modes() > 0 and recorded():
        return False
    if functorch_level() is not None and (functionalised() or stands_for_many(x)):
        return False
    return not (x.is_cuda and capturing(x))
