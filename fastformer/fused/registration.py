"""Registration of launchers as torch ops, which torch.compile, fake tensors and opcheck understand.

An op has a schema, a launcher and a fake; it carries no autograd: the `autograd.Function` beside it does, and all
differentiable use goes through that. Defined by hand in a Library, an op costs 2 us a call; `torch.library.custom_op`
costs 9 and `triton_op` 11, which moreover cannot be traced under the interpreter (measured on a CPU, trivial body).
With tensors and numbers to convert it is 10 us of 30, so a call that nobody else looks at goes to the launcher itself.

Triton is imported by the first call of an op, never by `import fastformer`.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, torch.dtype}
LAUNCHERS: dict[str, str] = {}  # op -> `ROOM.FILE.FUNCTION` in fastformer_kernels
_LIBRARY = torch.library.Library("fastformer", "DEF")  # type: ignore[no-untyped-call]


@cache
def _launcher(module: str, function: str) -> Callable[..., Any]:
    from fastformer_kernels.host.plan import planned

    return planned(getattr(importlib.import_module(f"fastformer_kernels.{module}"), function))


def define(schema: str, launcher: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op `fastformer::NAME`.

    Args:
        schema: `NAME(Tensor x, float eps) -> (Tensor, Tensor)`; what is written to is `Tensor(a!)`.
        launcher: `ROOM.FILE.FUNCTION` in fastformer_kernels, called with the op's arguments.
        fake: takes the same arguments and returns empty tensors of the shapes, dtypes and strides of the results.

    Returns:
        A function of the op's arguments that calls it.
    """
    name = schema.split("(")[0]
    module, function = launcher.rsplit(".", 1)
    LAUNCHERS[name] = launcher
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]

    def run(*args: Any) -> Any:
        return _launcher(module, function)(*args)

    # On CPU tensors a launcher runs in Triton's interpreter, or raises; `unsupported` keeps others away from it.
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fastformer::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fastformer, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _observed(args):
            return op(*args)
        return _launcher(module, function)(*args)

    return call


def _observed(args: tuple[Any, ...]) -> bool:
    """Whether a mode, a transform, a trace or a profiler is to see the op, or an argument is a tensor with its own."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or not {type(x) for x in args} <= _PLAIN
    )


def dropout_seed(x: Tensor) -> Tensor:
    """Draw the seed of one dropout mask, int64 `[1]`, from the generator of x's device.

    Drawn by torch on the device: `manual_seed`, `fork_rng` and activation checkpointing reproduce it, a CUDA graph
    draws a new one at each replay, and nothing waits.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device)
