"""Predicates for torch.compile, export, tracing, torch.func transforms, CUDA-graph capture and profilers.

A program that is compiled, exported, traced or captured runs for other values too: a decision by the values at hand
would be wrong for the next ones. A tensor inside `torch.func.vmap` stands for many tensors. Modes, transforms and
profilers must see ops that would otherwise bypass the dispatcher.

No other module uses `torch._C` for these questions. Predicates for every call of an op alias torch's functions,
because a Python function around them would double their host time.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad as forward_ad

compiling = torch.compiler.is_compiling  # True while Dynamo or torch.export traces the call
exporting = torch.compiler.is_exporting  # torch.export, so ONNX too: one program for all batches; compiling() is True
functorch_level = torch._C._functorch.maybe_current_level  # None outside torch.func
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many TorchDispatchModes are active
function_modes = torch._C._len_torch_function_stack  # likewise TorchFunctionModes
without_subclasses = torch._C.DisableTorchFunctionSubclass  # a context in which subclasses of Tensor are plain tensors
tracing_state = torch._C._get_tracing_state  # None outside torch.jit.trace
profiling = torch._C._autograd._profiler_enabled
current_node = torch._C._current_autograd_node  # the node of autograd that runs, or whose hook runs
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # None if tensors are saved unchanged


def autocast_on_gpu_has(op: str) -> bool:
    """Return whether autocast on a GPU has a rule for `aten::OP`; without a rule, autocast does not change the op."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")


def needs_dispatcher() -> bool:
    """Return whether something observes single ops or needs a rule for each: no op may then replace several."""
    return (
        compiling()
        or dispatch_modes() > 0
        or functorch_level() is not None
        or tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def in_torch_func() -> bool:
    """Return whether a transform of torch.func is active; False while compiling, when torch cannot tell."""
    return not compiling() and functorch_level() is not None


def in_vmap() -> bool:
    """Return whether a vmap is active; any argument of an op may then stand for many tensors, a weight included."""
    return _has_level(torch._C._functorch.TransformType.Vmap)


def _has_level(kind: Any) -> bool:
    return any(level.key() == kind for level in torch._C._functorch.get_interpreter_stack() or ())


def is_batched_tensor(x: Tensor) -> bool:
    """Return whether x stands for many tensors of a vmap, also inside other transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def is_recording_graph() -> bool:
    """Return whether the ops that run are recorded as a program, by torch.compile, export, a trace or make_fx."""
    if compiling() or tracing_state() is not None:
        return True
    return dispatch_modes() > 0 and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph captures the work on x's device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def readable(x: Tensor) -> bool:
    """Return whether x has values that may decide what runs, and reading them waits for no device."""
    return x.is_cpu and x.numel() > 0 and has_values(x)


def has_values(x: Tensor) -> bool:
    """Return whether the values of x, on any device, may decide what runs: they exist, and are those of this batch."""
    if is_recording_graph() or x.is_meta or isinstance(x, FakeTensor) or capturing(x):
        return False
    if functorch_level() is None:
        return True
    # Tensors of functionalize have no memory.
    return not (_has_level(torch._C._functorch.TransformType.Functionalize) or is_batched_tensor(x))
