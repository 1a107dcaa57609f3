"""Weights for inference on a CPU in fp32: the same numbers, in the order in which a product reads them fastest.

That is the order of oneDNN's blocks, with which 4 to 128 rows take a third to nine tenths of the time that MKL takes on
a CPU of AMD; by columns for one row where D > K, and where a weight is small.

Letters: D outputs and K inputs of a linear map, M rows.
"""

from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.host.devices import autocasts
from fastformer.modes import watched, without_subclasses
from fastformer.nn.modules import OURS

# What torch.compile uses for linear layers whose weights are frozen.
_BLOCKS = hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Of rows, which oneDNN is told, and gets: fewer take it longer. Weights of 512 x 512 and 512 x 2048 in us, by MKL by
# columns, by oneDNN, padded: 1 row 114, 86, 91 and 402, 322, 243; 3 rows by oneDNN 115 and 261, 4 rows 105 and 231.
_FEWEST = 4
_LEAST = 1 << 18  # numbers of a weight: a call of oneDNN takes 20 us more, and the first with each number of rows 650
_PARTS = 8  # of a weight that are kept: attention asks for queries, keys, values, and keys with values


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of a model's linear maps and of attention's projections, in place, for inference on a CPU.

    Changed are nn.Linear and fastformer's MultiheadAttention, not their subclasses, and of their weights those in fp32
    on the CPU. Every number stays. A large weight is kept twice, and each operation but a product in inference sees an
    ordinary parameter: the model can still be saved, moved and trained. An embedding that shares a weight keeps its
    own.
    """
    attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    others = [x for x in attentions if type(x) is not OURS[nn.MultiheadAttention]]
    left = {id(part) for attention in others for part in attention.modules()}
    packed = WeakTensorKeyDictionary()  # what several modules share is packed once
    for module in model.modules():
        for name in () if id(module) in left else _weights_of(module):
            weight = module._parameters.get(name)
            if weight is None or isinstance(weight, PackedWeight):
                continue
            if weight.dtype == torch.float32 and weight.is_cpu:
                if weight not in packed:
                    with torch.inference_mode(False):
                        by_columns = weight.detach().t().clone(memory_format=torch.contiguous_format).t()
                    large = _BLOCKS and weight.numel() >= _LEAST
                    packed[weight] = (PackedWeight if large else nn.Parameter)(by_columns, weight.requires_grad)
                module._parameters[name] = packed[weight]


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
        return ("weight",)
    if type(module) is OURS[nn.MultiheadAttention]:
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ()


class PackedWeight(nn.Parameter):
    """A parameter `[D, K]` by columns, of whose products in inference a copy in oneDNN's blocks is read."""

    state: tuple[int, int]
    kept: dict[object, Tensor]  # the blocks, and parts by their first and last row; all of this state

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear` with this weight."""
        with without_subclasses():
            D, K = self.shape
            M = x.numel() // max(K, 1)
            usual = type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and x.dim() > 1 and x.shape[-1] == K
            # oneDNN reads D numbers in a row of the bias.
            usual = usual and (bias is None or (bias.shape == (D,) and bias.stride() == (1,)))
            if not usual or M == 0 or (M == 1 and D > K) or autocasts(x) or not self._unwatched(x, bias):
                return F.linear(x, self, bias)
            blocks = self._blocks()
            if M >= _FEWEST:
                return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], ""))
            rows = x.reshape(M, K)
            padded = rows.expand(_FEWEST, K) if M == 1 else F.pad(rows, (0, 0, 0, _FEWEST - M))
            out = torch.ops.mkldnn._linear_pointwise(padded, blocks, bias, "none", [], "")
            return cast(Tensor, out[:M].view(*x.shape[:-1], D))

    def _unwatched(self, *others: Tensor | None) -> bool:
        """Return whether no gradient is asked for, and no mode sees the single operations."""
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (self, *others))
        return not learns and not watched() and bool(torch.backends.mkldnn.enabled)

    def _kept(self) -> dict[object, Tensor]:
        """Return what was made of the values that the parameter has now."""
        state = self.data_ptr(), self._version
        if self.__dict__.get("state") != state:
            self.state, self.kept = state, {}
        return self.kept

    def _blocks(self) -> Tensor:
        """Return the copy in blocks."""
        kept = self._kept()
        if None not in kept:
            kept[None] = torch.ops.mkldnn._reorder_linear_weight(self.detach(), _FEWEST)
        return kept[None]

    def _rows(self, first: int, last: int) -> Tensor:
        """Return rows first to last - 1, packed where they are many; each part is made once."""
        with without_subclasses():
            kept = self._kept()
            if (first, last) not in kept:
                if len(kept) > _PARTS:
                    kept.clear()
                with torch.inference_mode(False):
                    part = self.detach()[first:last]
                    kept[first, last] = PackedWeight(part, False) if part.numel() >= _LEAST else part
            return kept[first, last]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), PackedWeight):
            return _linear(*args, **kwargs)
        self = args[0] if args else None
        if isinstance(self, PackedWeight) and len(args) == 2 and self._unwatched():
            if function is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
                return self._rows(*args[1].indices(len(self))[:2])
            if function is Tensor.split_with_sizes:
                return tuple(self._rows(*bounds) for bounds in pairwise(accumulate(args[1], initial=0)))
        with without_subclasses():
            return function(*args, **kwargs)


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)
