"""Compile the kernels that a step of a model launches, several at a time, before its first run."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastformer.backend import BackendError
from fastformer.functional.choice import FAULT_OF_LAUNCHERS


def warm_up(
    model: nn.Module,
    *inputs: Any,
    step: Callable[..., Any] | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> int:
    """Compile the kernels that a step of a model launches, in parallel, into Triton's cache on disk.

    Runs `step(*inputs)` once, and backward if its result has a gradient. Kernels are compiled and not started: tensors
    that they would write hold zeros. Gradients, buffers and random generators are restored at the end. Other changes
    stay, so the step must not update parameters.

    Args:
        model: on the GPU, in `train` or `eval` mode and under autocast like the run to come.
        inputs: arguments of the step, of the shapes to come.
        step: returns a loss or outputs, such as `model.generate`; it calls no backward itself. None: the model.
        workers: threads that compile; None: one a processor. Triton's compiler runs without Python's lock.
        progress: whether to write the number of compiled kernels to stderr.

    Returns:
        The number of kernels that this process had neither compiled nor loaded before; 0 if no kernel runs, as on a
        CPU.

    Raises:
        BackendError: Triton cannot launch kernels on this machine, because it has no C compiler; nothing has run.
    """
    if importlib.util.find_spec("triton") is None:
        return 0
    if FAULT_OF_LAUNCHERS is not None and any(parameter.is_cuda for parameter in model.parameters()):
        raise BackendError(f"warm_up {FAULT_OF_LAUNCHERS}")

    def compile_kernels() -> int:
        from triton import AsyncCompileMode

        with ThreadPoolExecutor(workers or os.cpu_count()) as pool, AsyncCompileMode(pool) as mode:
            # Backward runs in this thread, too: only in this thread kernels are compiled without a start.
            with _restored(model), _only_compiled(), torch.autograd.set_multithreading_enabled(False):
                result = (step or model)(*inputs)
                outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
                torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
            total = len(mode.raw_futures)
            for done, _ in enumerate(as_completed(mode.raw_futures), 1):
                if progress:
                    end = "\n" if done == total else ""
                    print(f"\r{done} of {total} kernels compiled", end=end, file=sys.stderr, flush=True)
        return total

    return copy_context().run(compile_kernels)  # after a failed compilation, Triton's mode would stay on


@contextmanager
def _only_compiled() -> Iterator[None]:
    """Compile kernels and do not start them."""
    from fastformer_kernels.host.launch import only_compiled
    from fastformer_kernels.host.plan import forget

    forget()  # plans start kernels
    try:
        with only_compiled():
            yield
    finally:
        forget()  # a launcher that starts nothing counts as one that cannot be repeated


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random generators at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng({parameter.device for parameter, _ in gradients if parameter.is_cuda}):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
