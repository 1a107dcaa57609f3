"""The noise of a formula: how far its results move when every number that it computes is rounded, at random.

A tolerance has to know the terms: a gradient that is zero as its terms cancel is as noisy as these are large, and of a
result that is one number, a computation may by chance round the right way. So the formula is run in fp64, where each
operand and each result of an operation is moved by a random part of half a rounding of the dtype (a Monte Carlo form of
running error analysis; Parker 1997, "Monte Carlo arithmetic"). Operations that hide subtractions are written out. No
number depends on which code torch, oneDNN or MKL choose for a machine: in fp64 all of them are exact enough.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DRAWS = 8
DEVIATIONS = 4.0  # a result of one number is normally distributed: 6 in 100,000 are further away
_aten = torch.ops.aten
# 1 + erf(x), 1 - tanh(x)^2, x - max(x), x - mean(x), g - sum(g p): terms that cancel, inside of one operation.
_WRITTEN_OUT = get_decompositions(
    [
        _aten.gelu,
        _aten.gelu_backward,
        _aten.silu,
        _aten.silu_backward,
        _aten.tanh_backward,
        _aten._softmax,
        _aten._softmax_backward_data,
        _aten._log_softmax,
        _aten._log_softmax_backward_data,
        _aten.native_layer_norm,
        _aten.native_layer_norm_backward,
        _aten._fused_rms_norm,
        _aten._fused_rms_norm_backward,
    ]
)


_SUMS = {_aten.sum, _aten.mean, _aten.var_mean}
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}  # where the first factor stands


def _terms(func: Any, args: Any) -> int:
    """Return how many numbers are summed for an element of the result."""
    name = func.overloadpacket
    if name in _PRODUCTS:
        return int(args[_PRODUCTS[name]].shape[-1])
    if name in _SUMS:
        dims = args[1] if len(args) > 1 and args[1] else range(args[0].dim())
        return math.prod(args[0].shape[i] for i in dims)
    return 0


class _Rounded(TorchDispatchMode):
    """Results are rounded to the dtype; terms of a sum to what sums are kept in, each as often as a sum passes by."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__()
        self.info = torch.finfo(dtype)
        self.generator = torch.Generator(device).manual_seed(seed)

    def rounded(self, x: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float64 or x.numel() == 0 or x.device.type != self.generator.device.type:
            return x
        part = torch.rand(x.shape, generator=self.generator, dtype=x.dtype, device=x.device).sub_(0.5)
        moved = x * (eps * part).add_(1.0)  # zeros, masks and infinities stay
        if self.info.dtype != "float16":
            return moved
        # Numbers below the smallest normal one, which occur in fp16, have its spacing.
        return torch.where(x.abs() < self.info.smallest_normal, x + eps * self.info.smallest_normal * part, moved)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITTEN_OUT:
            with self:
                return _WRITTEN_OUT[func](*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        terms = _terms(func, args)
        if terms and func._schema.arguments[0].alias_info is None:
            # Added one after the other, n terms of like size have the error of terms rounded sqrt(n / 2) times each.
            eps = min(self.info.eps, torch.finfo(torch.float32).eps) * max(1.0, (terms / 2) ** 0.5)
            args = tree_map_only(Tensor, lambda x: self.rounded(x, eps), args)
        actual = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return tree_map_only(Tensor, lambda x: self.rounded(x, self.info.eps), actual)
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                tree_map_only(Tensor, lambda x: x.copy_(self.rounded(x, self.info.eps)), written)
        return actual


def noise(run: Callable[[], Sequence[Tensor]], exact: Sequence[Tensor], dtype: torch.dtype) -> list[float]:
    """Return how far each result of `run` moves: the root mean square of its largest differences to `exact`."""
    squares = torch.zeros(len(exact), dtype=torch.float64)
    for seed in range(DRAWS):
        with sdpa_kernel(SDPBackend.MATH), _Rounded(dtype, exact[0].device, seed):
            actual = run()
        for i, (a, e) in enumerate(zip(actual, exact, strict=True)):
            squares[i] += (a - e).abs().amax().square().cpu() if a.numel() else 0.0
    return (squares / DRAWS).sqrt().tolist()
