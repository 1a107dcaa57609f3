"""Rotary position embeddings (Su et al. 2021, equation 34): op, checks, reference, registration, autograd Function.

Backward rotates the gradient by the negative angle, with the same op. So x is not saved for backward, and gradients are
differentiable any number of times.

Letters: H heads, K head size, R the first numbers of a head that are rotated, P positions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.functional.choice import runs_fused
from fastformer.host.autograd_function import call, define
from fastformer.host.devices import check_range, check_tensors
from fastformer.modes import readable

_LARGEST_HEAD = 1024  # a tile of the kernel has whole heads


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of numbers of each head by angles that grow with the position (RoFormer, Su et al. 2021, eq. 34).

    The pair i of a token at position p becomes (a cos[p, i] - b sin[p, i], b cos[p, i] + a sin[p, i]). Computed in
    fp32, of fp64 in fp64, and rounded once.

    Args:
        x: `[..., H, K]`, floating point; any strides, and no copy where those of the last dimension are 1.
        positions: int64, of a shape that broadcasts to `x.shape[:-2]`: `[T]` packed; `[T]`, `[B, T]` or `[B, 1]` dense.
        cos, sin: `[P, R / 2]`, fp32 or fp64, of p times the frequency of each pair; constants, without a gradient. The
            first R <= K numbers of each head are rotated, the others copied.
        interleaved: whether the numbers 2i and 2i + 1 are pairs, as in the paper and in GPT-J, rather than i and
            i + R / 2, as in Llama.

    Returns:
        Of the shape and dtype of x, contiguous. A position outside the tables raises ValueError on the CPU. On a GPU a
        check would wait for the device: the fused kernel gives NaN.
    """
    check_tensors(("x", "positions", "cos", "sin"), x, (positions, cos, sin))
    _check(x, positions, cos, sin)

    def limit() -> str | None:
        K = x.shape[-1]
        return f"rotary takes heads of at most {_LARGEST_HEAD} numbers, not {K}" if K > _LARGEST_HEAD else None

    if not runs_fused("rotary", x, limit):
        return _plain(x, positions, cos, sin, interleaved)
    if x.dim() > 4:  # the kernel takes at most two dimensions of tokens
        positions = positions.expand(x.shape[:-2]).flatten(0, -2)
        return call(_Rotary, x.flatten(0, -4), positions, cos, sin, interleaved, 1.0).view(x.shape)  # type: ignore[no-any-return]
    return call(_Rotary, x, positions, cos, sin, interleaved, 1.0)  # type: ignore[no-any-return]


def _check(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, not {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"x must be of shape [..., H, K], not {list(x.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, not {table.dtype}")
        if table.requires_grad:
            raise ValueError(f"{name} requires a gradient, which rotary has for x only; pass {name}.detach()")
    K = x.shape[-1]
    if cos.dim() != 2 or 2 * cos.shape[1] > K:
        raise ValueError(f"cos must be of shape [P, R / 2], R at most {K}, the size of a head, not {list(cos.shape)}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin must be of the shape of cos, {list(cos.shape)}, not {list(sin.shape)}")
    tokens, P = x.shape[:-2], cos.shape[0]
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64, not {positions.dtype}")
    sizes = zip(reversed(positions.shape), reversed(tokens), strict=False)
    if positions.dim() > len(tokens) or any(n not in (1, size) for n, size in sizes):
        raise ValueError(f"positions must broadcast to x.shape[:-2], {list(tokens)}, not {list(positions.shape)}")
    if readable(positions):  # a message with P would make a graph for each P
        check_range("positions", positions, P - 1, f", as cos and sin have P = {P} rows")


def _plain(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute the reference."""
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = (F.embedding(positions, table).to(wide).unsqueeze(-2) for table in (cos, sin))
    R = 2 * cos.shape[1]
    pairs = x[..., :R].to(wide)
    # Whole heads at a time: passes over halves of them, as the paper writes it, took 1.3 to 2 times as long.
    places = -1 if interleaved else -2
    c, s = (torch.stack(pair, places).flatten(-2) for pair in ((c, c), (-s, s)))
    partners = pairs.view(*pairs.shape[:-1], R // 2, 2).flip(-1).flatten(-2) if interleaved else pairs.roll(R // 2, -1)
    out = torch.addcmul(pairs * c, partners, s)
    return torch.cat([out.to(x.dtype), x[..., R:]], -1) if x.shape[-1] > R else out.to(x.dtype)


_rotary = define(
    "rotary(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved, float sign) -> Tensor",
    "rotary.kernels.rotary",
    lambda x: x.new_empty(x.shape),
)


class _Rotary(torch.autograd.Function):
    """x of 2 to 4 dimensions, positions, cos, sin, interleaved, the sign of the angle -> the result of `rotary`."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return _rotary(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tables, ctx.interleaved, ctx.sign = inputs
        ctx.save_for_backward(*tables)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return call(_Rotary, dout, *ctx.saved_tensors, ctx.interleaved, -ctx.sign), *(None,) * 5
