"""Ops of Liger-Kernel and of quack, by the arguments that ours take; written for Liger-Kernel 0.8.5 and quack 0.6.4.

Liger-Kernel has each of these ops in Triton ("liger") and in CuTe ("liger-cute"). For a whole process
`LIGER_KERNEL_IMPL=cutedsl` chooses the second; here the same implementations are asked for by name, so that one process
has both. The output projection with its loss would otherwise take its CuTe part unasked, where CuTe is installed.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_IMPLEMENTATIONS = {"liger": "nvidia-triton", "liger-fp32": "nvidia-triton", "liger-cute": "nvidia-cutedsl"}


@cache
def liger(op: str, competitor: str) -> Callable[..., Any]:
    """An op of `liger_kernel.functional` as that competitor has it.

    Raises:
        liger_kernel.backends.ImplNotAvailableError: it cannot run here; when it is called, it does not take the shape.
    """
    import liger_kernel  # noqa: F401  # says where the implementations are
    from liger_kernel.backends import resolve_impl

    os.environ["LIGER_KERNEL_STRICT"] = "1"  # else CuTe's kernels warn once and run Triton's where a row is too wide
    call: Callable[..., Any] = resolve_impl(op, _IMPLEMENTATIONS[competitor]).call
    return call


def liger_loss(competitor: str, x: Tensor, w: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Mean cross entropy of x w^T.

    In Triton with both ways to add up the gradient of the weight over the chunks: in its own dtype, or in fp32, from
    which it is cast on the way out, as ours is. "liger-cute-sm90" is what Liger-Kernel has for Hopper alone, apart from
    all implementations: it smooths nothing.
    """
    if competitor == "liger-cute-sm90":
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90

        alone: Tensor = liger_fused_linear_cross_entropy_sm90(x, w, target)
        return alone
    accumulated = torch.float32 if competitor == "liger-fp32" else None
    run = liger("fused_linear_cross_entropy", competitor)
    loss: Tensor = run(x, w, target, label_smoothing=smoothing, accum_dtype=accumulated)[0]
    return loss


def quack_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of x w^T, nothing smoothed."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss: Tensor = chunked_linear_cross_entropy(x, w, target)
    return loss


def quack_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """`[M, N]`."""
    out: Tensor = _QuackLayerNorm.apply(x, w, b, eps)  # type: ignore[no-untyped-call]
    return out


def quack_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """`[M, N]`."""
    from quack import rmsnorm

    out: Tensor = rmsnorm(x, w, eps=eps)
    return out


class _QuackLayerNorm(torch.autograd.Function):
    """quack's two kernels of layer norm, which it does not differentiate by itself; they take fp32 parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        ctx.dtype = w.dtype
        w = w.float()
        out, deviation, mean = layernorm_fwd(x, w, b.float(), eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, w, deviation, mean)
        normalised: Tensor = out
        return normalised

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from quack.rmsnorm import layernorm_bwd

        x, w, deviation, mean = ctx.saved_tensors
        dx, dw, db = layernorm_bwd(x, w, grads[0].contiguous(), deviation, mean)
        return dx, dw.to(ctx.dtype), db.to(ctx.dtype), None
