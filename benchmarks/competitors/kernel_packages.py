"""Ops of Liger-Kernel 0.8.5 and quack 0.6.4 with fastformer's arguments.

Liger-Kernel has each op in Triton ("liger") and in CuTe ("liger-cute"). `LIGER_KERNEL_IMPL=cutedsl` chooses the second
for a whole process; here implementations are chosen by name, so that one process has both.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_IMPLEMENTATIONS = {"liger": "nvidia-triton", "liger-fp32": "nvidia-triton", "liger-cute": "nvidia-cutedsl"}


@cache
def liger(op: str, competitor: str) -> Callable[..., Any]:
    """Return an op of `liger_kernel.functional` in a competitor's implementation.

    Raises:
        liger_kernel.backends.ImplNotAvailableError: it cannot run here; when it is called, it does not take the shape.
    """
    import liger_kernel  # noqa: F401  # says where the implementations are
    from liger_kernel.backends import resolve_impl

    os.environ["LIGER_KERNEL_STRICT"] = "1"  # else CuTe's kernels warn once and run Triton's where a row is too wide
    return resolve_impl(op, _IMPLEMENTATIONS[competitor]).call


def liger_loss(competitor: str, x: Tensor, w: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross entropy of x w^T.

    "liger" adds up the gradient of the weight over the chunks in its own dtype, "liger-fp32" in fp32 as fastformer
    does. "liger-cute-sm90" is for Hopper alone and smooths nothing.
    """
    if competitor == "liger-cute-sm90":
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

        return liger_fused_linear_cross_entropy_sm90(x, w, target)
    accumulated = torch.float32 if competitor == "liger-fp32" else None
    run = liger("fused_linear_cross_entropy", competitor)
    return run(x, w, target, label_smoothing=smoothing, accum_dtype=accumulated)[0]


class _QuackLayerNorm(torch.autograd.Function):
    """Differentiate by quack's two kernels of layer norm, which take fp32 parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        ctx.dtype = w.dtype
        w = w.float()
        out, deviation, mean = layernorm_fwd(x, w, b.float(), eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, w, deviation, mean)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from quack.rmsnorm import layernorm_bwd

        x, w, deviation, mean = ctx.saved_tensors
        dx, dw, db = layernorm_bwd(x, w, grads[0].contiguous(), deviation, mean)
        return dx, dw.to(ctx.dtype), db.to(ctx.dtype), None


QUACK: dict[str, Callable[..., Tensor]] = {
    "loss": lambda *inputs: import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(*inputs),
    "rms_norm": lambda x, w, eps: import_module("quack").rmsnorm(x, w, eps=eps),
    "layer_norm": _QuackLayerNorm.apply,
}
