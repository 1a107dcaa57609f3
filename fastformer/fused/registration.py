"""Registration of launchers as torch ops, which torch.compile, fake tensors and opcheck understand.

An op has a schema, a launcher and a fake; it carries no autograd: the `autograd.Function` beside it does, and all
differentiable use goes through that. Defined by hand in a Library, an op costs 2 us a call; `torch.library.custom_op`
costs 9 and `triton_op` 11, which moreover cannot be traced under the interpreter (measured on a CPU, trivial body).

Triton is imported by the first call of an op, never by `import fastformer`.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fastformer", "DEF")  # type: ignore[no-untyped-call]


@cache
def _launcher(module: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"fastformer_kernels.{module}"), function)  # type: ignore[no-any-return]


def define(schema: str, launcher: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the op `fastformer::NAME`.

    Args:
        schema: `NAME(Tensor x, float eps) -> (Tensor, Tensor)`; what is written to is `Tensor(a!)`.
        launcher: `FILE.FUNCTION` in fastformer_kernels, called with the op's arguments.
        fake: takes the same arguments and returns empty tensors of the shapes, dtypes and strides of the results.

    Returns:
        The op, to be called with tensors.
    """
    name = schema.split("(")[0]
    module, function = launcher.split(".")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]

    def launch(*args: Any) -> Any:
        return _launcher(module, function)(*args)

    # On CPU tensors a launcher runs in Triton's interpreter, or raises; `unsupported` keeps others away from it.
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, launch, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fastformer::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fastformer, name).default  # type: ignore[no-any-return]


def dropout_seed(x: Tensor) -> Tensor:
    """Draw the seed of one dropout mask, int64 `[1]`, from the generator of x's device.

    Drawn by torch on the device: `manual_seed`, `fork_rng` and activation checkpointing reproduce it, a CUDA graph
    draws a new one at each replay, and nothing waits.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device)
