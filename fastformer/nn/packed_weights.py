"""Packed weights: fp32 weights in the order that matrix products on a CPU read fastest, for inference.

`pack_weights` stores them by columns. A large one is copied into oneDNN's blocks, too, at the first product that reads
them. On an AMD CPU, 4 to 128 rows then take a third to nine tenths of MKL's time; one row reads the columns where
D > K. On an Intel CPU, blocks take 0.5 to 0.9 of MKL's time by columns for 6 to 24 rows, else 0.9 to 1.6.

Letters: M rows, D outputs, K inputs.
"""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.host.devices import autocasts
from fastformer.modes import needs_dispatcher, without_subclasses
from fastformer.nn.modules import DROP_INS
from fastformer.nn.projections import OUT_PROJECTIONS


def _is_intel() -> bool:
    """Return whether the processor is Intel's, for which MKL is written."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return False


# The op that torch.compile uses for linear layers with frozen weights.
_HAS_BLOCKS = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_IS_INTEL = _is_intel()
_ROWS_ON_INTEL = range(6, 25)
# Rows that weights are packed for and inputs padded to, because oneDNN is slower with fewer: weights of 512 x 2048 with
# 1 row took 322 us, padded 243 (by MKL 402).
_MIN_ROWS = 4
# Elements of a packed weight: a call of oneDNN takes 20 us more, and the first call with each number of rows 650 us.
_MIN_PACKED_SIZE = 1 << (19 if _IS_INTEL else 18)
_DATA = Tensor.data.__get__, Tensor.data.__set__, Tensor.grad.__set__  # type: ignore[attr-defined, union-attr]
_MAX_SLICES = 8  # cached slices of a weight: attention reads those of queries, keys, values, and keys with values


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of a model's linear layers and attention projections, in place, for inference on a CPU.

    Packs fp32 weights on the CPU, of nn.Linear and fastformer's MultiheadAttention, not of subclasses. A large weight
    is stored twice. The model can still be saved, moved and trained. Prune and parametrise it before, because
    `weight.view(-1)` and, if it is large, `nn.Parameter(weight)` raise. Values written through NumPy, or through a
    `.data` that was taken before the last call, are not noticed. An embedding that shares a weight keeps the original
    parameter.
    """
    attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    unpacked = [x for x in attentions if type(x) is not DROP_INS[nn.MultiheadAttention]]
    skipped = {id(module) for attention in unpacked for module in attention.modules()}
    packed = WeakTensorKeyDictionary()  # a weight that several modules share is packed once
    for module in model.modules():
        for name in () if id(module) in skipped else _weights_of(module):
            weight = module._parameters.get(name)
            if weight is None or isinstance(weight, PackedWeight) or weight.dtype != torch.float32 or not weight.is_cpu:
                continue
            large = _HAS_BLOCKS and weight.numel() >= _MIN_PACKED_SIZE
            if weight.t().is_contiguous() and not large:
                continue
            if weight not in packed:
                with torch.inference_mode(False):
                    by_columns = weight.detach().t().clone(memory_format=torch.contiguous_format).t()
                packed[weight] = (PackedWeight if large else nn.Parameter)(by_columns, weight.requires_grad)
            module._parameters[name] = packed[weight]


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    if type(module) in OUT_PROJECTIONS:
        return ("weight",)
    if type(module) is DROP_INS[nn.MultiheadAttention]:
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ()


class PackedWeight(nn.Parameter):
    """A parameter `[D, K]` stored by columns, with a copy in oneDNN's blocks for products in inference."""

    state: tuple[int, int]
    hook: RemovableHandle  # called when a gradient is added to `grad`
    copies: dict[object, Tensor]  # of values at `state`: the blocks at None, slices at (first row, last row)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear` with this weight."""
        with without_subclasses():
            D, K = self.shape
            M = x.numel() // max(K, 1)
            blocks_are_faster = M in _ROWS_ON_INTEL if _IS_INTEL else M > 1 or (M == 1 and D <= K)
            if not blocks_are_faster:
                return F.linear(x, self, bias)
            supported = type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and x.dim() > 1 and x.shape[-1] == K
            # oneDNN reads D consecutive numbers of the bias.
            supported = supported and (bias is None or (bias.shape == (D,) and bias.stride() == (1,)))
            if not supported or autocasts(x) or not self._may_read_copies(x, bias):
                return F.linear(x, self, bias)
            blocks = self._blocks()
            if M >= _MIN_ROWS:
                return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], ""))
            rows = x.reshape(M, K)
            padded = rows.expand(_MIN_ROWS, K) if M == 1 else F.pad(rows, (0, 0, 0, _MIN_ROWS - M))
            out = torch.ops.mkldnn._linear_pointwise(padded, blocks, bias, "none", [], "")
            return cast(Tensor, out[:M].view(*x.shape[:-1], D))

    def _may_read_copies(self, *tensors: Tensor | None) -> bool:
        """Return whether no gradient is needed or held, and no mode observes single operations."""
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (self, *tensors))
        return not learns and self.grad is None and not needs_dispatcher() and bool(torch.backends.mkldnn.enabled)

    def _current_copies(self) -> dict[object, Tensor]:
        """Return the copies of the parameter's present values; discard copies of earlier ones."""
        state = self.data_ptr(), self._version
        if self.__dict__.get("state") != state:
            self.state, self.copies = state, {}
            if self.requires_grad and "hook" not in self.__dict__:
                self.hook = self.register_post_accumulate_grad_hook(PackedWeight._discard_copies)  # type: ignore[no-untyped-call]
        return self.copies

    def _discard_copies(self) -> None:
        """Discard the copies, because values may change without a new version: by `.data`, or a fused optimiser."""
        self.__dict__.pop("state", None)

    def _blocks(self) -> Tensor:
        """Return the copy in oneDNN's blocks."""
        copies = self._current_copies()
        if None not in copies:
            copies[None] = torch.ops.mkldnn._reorder_linear_weight(self.detach(), _MIN_ROWS)
        return copies[None]

    def _rows(self, first: int, last: int) -> Tensor:
        """Return rows first to last - 1, packed if they are large; each slice is packed once."""
        with without_subclasses():
            copies = self._current_copies()
            if (first, last) not in copies:
                if len(copies) > _MAX_SLICES:
                    copies.clear()
                with torch.inference_mode(False):
                    rows = self.detach()[first:last]
                    copies[first, last] = PackedWeight(rows, False) if rows.numel() >= _MIN_PACKED_SIZE else rows
            return copies[first, last]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), PackedWeight):
            return _packed_linear(*args, **kwargs)
        self = args[0] if args else None
        if function in _DATA and isinstance(self, PackedWeight):  # new values may even lie at the old address
            self._discard_copies()
        if isinstance(self, PackedWeight) and len(args) == 2 and self._may_read_copies():
            if function is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
                return self._rows(*args[1].indices(len(self))[:2])
            if function is Tensor.split_with_sizes:
                return tuple(self._rows(*bounds) for bounds in pairwise(accumulate(args[1], initial=0)))
        with without_subclasses():
            return function(*args, **kwargs)


def _packed_linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)
