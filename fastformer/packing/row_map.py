"""Maps of rows, with gathers as forward and backward, for packing and unpacking."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastformer.modes import compiling, watched


class RowMap(NamedTuple):
    """A map of M rows to distinct slots among N: `slots` int64 `[M]`, and `inverse` int64 `[N]`.

    The inverse holds M at slots without a row. With it, both directions read rows in order of the result, forward and
    backward: three times as fast as writing rows to their slots (2,244 x 4 rows of 64, one CPU core: 0.5 against
    1.4 ms).
    """

    slots: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, slots: Tensor, places: int) -> "RowMap":
        """Build the map of rows to `slots` among N = `places`."""
        M = slots.numel()
        inverse = torch.full((places,), M, dtype=torch.int64, device=slots.device)
        return cls(slots, inverse.index_copy_(0, slots, torch.arange(M, device=slots.device)))

    def gather(self, x: Tensor) -> Tensor:
        """Read the rows from their slots: `[N, ...]` -> `[M, ...]`. Differentiable."""
        # Compilers, modes and transforms differentiate torch's own ops.
        if x.requires_grad and torch.is_grad_enabled() and not watched():
            return _Move.apply(x, *self, False)  # type: ignore[no-untyped-call, no-any-return]
        return x.index_select(0, self.slots)

    def spread(self, x: Tensor) -> Tensor:
        """Write the rows to their slots, zeros elsewhere: `[M, ...]` -> `[N, ...]`. Differentiable."""
        if x.requires_grad and torch.is_grad_enabled() and not watched():
            return _Move.apply(x, *self, True)  # type: ignore[no-untyped-call, no-any-return]
        if compiling():
            return x.new_zeros(self.inverse.numel(), *x.shape[1:]).index_copy(0, self.slots, x)
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.inverse)


class _Move(torch.autograd.Function):
    """`RowMap.spread` or `gather`, each the derivative of the other; torch's own index_select adds in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, inverse: Tensor, spread: bool) -> Tensor:
        ctx.save_for_backward(slots, inverse)
        ctx.spread = spread
        if spread:
            return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, inverse)
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = RowMap(*ctx.saved_tensors)
        return rows.gather(grads[0]) if ctx.spread else rows.spread(grads[0]), None, None, None
