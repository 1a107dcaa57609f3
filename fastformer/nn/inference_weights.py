"""Weights for inference on a CPU, where a product of few rows takes as long as its weights to be read.

**fp32**: the same numbers in the order that a product reads best: that of oneDNN's blocks, with which 4 to 128 rows
take a third to nine tenths of the time that MKL takes on a CPU of AMD; by columns for one row where D > K, and where
a weight is small.

**In fewer bits**. `int8`: a scale for each row of a weight; the other factor is rounded to 7 bits in each call, with
one scale for all of it, so that a result depends on what else is in the batch (PyTorch's dynamic kernels, which add up
in int32), and a row that is not finite gives NaN. `bf16`: both factors and the result are rounded to bf16, sums are
fp32. All else stays in fp32: biases, norms, embeddings, softmax and attention's products.

D outputs and K inputs of a map: a product of one row reads D * K bytes, 2 D * K, or 4 D * K.
"""

import math
import warnings
from itertools import accumulate, pairwise
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.host.devices import autocasts
from fastformer.modes import forward_ad, readable, tracing_state, transformed, watched
from fastformer.nn.modules import OURS
from fastformer.settings import check_value

PRECISIONS = ("fp32", "bf16", "int8")
_NEW = (Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros, Tensor.new_tensor)
# What reads, shares or replaces memory, of which there is none: torch's own would read address 0, or change nothing.
_OF_MEMORY = (Tensor.data_ptr, Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# What torch.compile uses for linear layers whose weights are frozen.
_BLOCKS = hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Of rows, which oneDNN is told, and gets: fewer take it longer. Weights of 512 x 512 and 512 x 2048 in us, by MKL by
# columns, by oneDNN, padded: 1 row 114, 86, 91 and 402, 322, 243; 3 rows by oneDNN 115 and 261, 4 rows 105 and 231.
_FEWEST = 4
_LEAST = 1 << 18  # numbers of a weight: a call of oneDNN takes 20 us more, and the first with each number of rows 650
_PARTS = 8  # of a weight that are kept: attention asks for queries, keys, values, and keys with values
_LARGEST = 127  # of int8; -128 stays out, so that a weight and its negative round alike


def pack_weights(model: nn.Module, precision: str = "fp32") -> None:
    """Pack the weights of a model's linear maps and of attention's projections, in place, for inference on a CPU.

    Changed are nn.Linear and fastformer's MultiheadAttention, not subclasses and parametrised ones, nor torch's
    attention, whose function takes no such weights; a weight that an embedding shares stays as it is there, and what is
    packed stays as it is. Afterwards the model can neither be trained nor saved, cast or moved.

    Args:
        model: in fp32, on the CPU; with precision "fp32" weights of other dtypes and devices stay as they are.
        precision: "fp32" keeps every number, "bf16" and "int8" round them. In fp32, a weight with which both one row
            and several are multiplied is kept twice, and one of less than 2^18 numbers stays a parameter, by columns.

    Raises:
        ValueError: precision is none of the three, or the model is of another dtype or on another device.
        RuntimeError: this PyTorch has no int8 kernels.
    """
    check_value("precision", precision, str, choices=PRECISIONS)
    for name, x in model.named_parameters():
        if precision != "fp32" and (x.dtype != torch.float32 or not x.is_cpu):
            raise ValueError(f"model must be in fp32 on a CPU for {precision}, and {name} is {x.dtype} on {x.device}")
    attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    others = [x for x in attentions if type(x) is not OURS[nn.MultiheadAttention]]
    kept = {id(part) for attention in others for part in attention.modules()}
    known = WeakTensorKeyDictionary()  # what several modules share is packed once
    for module in model.modules():
        for name in () if id(module) in kept else _weights_of(module):
            weight = module._parameters.get(name)
            if weight is None or not weight.numel() or isinstance(weight, PackedWeight):
                continue
            if weight.dtype == torch.float32 and weight.is_cpu:
                if weight not in known:
                    known[weight] = _packed(weight, precision)
                module._parameters[name] = known[weight]
                if not isinstance(known[weight], PackedWeight):
                    continue
                if not hasattr(module, "__prepare_scriptable__"):  # torch.jit would save the weight's memory: zeros
                    module.__dict__["__prepare_scriptable__"] = _refuse_script


def _packed(weight: nn.Parameter, precision: str) -> nn.Parameter:
    values = weight.detach()
    if precision == "fp32" and not _has_blocks(values):
        return nn.Parameter(_by_columns(values), weight.requires_grad)
    kinds: dict[str, type[PackedWeight]] = {"fp32": _Float32, "bf16": _BFloat16, "int8": _Int8}
    return cast(nn.Parameter, kinds[precision].of(values))


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
        return ("weight",)
    if type(module) is OURS[nn.MultiheadAttention]:
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ()


def _refuse_script() -> NoReturn:
    raise TypeError("packed weights cannot be compiled by torch.jit.script: do so before pack_weights")


def _check_untraced() -> None:
    """Refuse torch.jit.trace, which has no constants for packed memory."""
    if tracing_state() is not None:
        raise TypeError("packed weights cannot be traced by torch.jit.trace: do so before pack_weights")


class PackedWeight(Tensor):
    """A weight `[D, K]` that says fp32 and is kept in another form: to be multiplied, or cut between rows."""

    parts: dict[tuple[int, int], "PackedWeight"]
    outputs: int  # as shape says, which would go by __torch_function__
    columns: int

    @classmethod
    def empty(cls, rows: int, columns: int) -> "PackedWeight":
        """One of this shape, without values."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), dtype=torch.float32, device=torch.device("cpu")
        )
        made.parts, made.outputs, made.columns = {}, rows, columns
        return made

    @classmethod
    def of(cls, weight: Tensor) -> "PackedWeight":
        """Pack a weight."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x, fp32 of at least two dimensions `[..., K]`, times the weight, and the bias: `[..., D]`."""
        raise NotImplementedError

    def cut(self, first: int, last: int) -> "PackedWeight":
        """The weight of these rows, without remembering it."""
        raise NotImplementedError

    def rows(self, first: int, last: int) -> "PackedWeight":
        """Rows first to last - 1; each part is made once."""
        part = self.parts.get((first, last))
        if part is None:
            part = self.cut(first, last)
            if len(self.parts) < _PARTS and not watched():  # whose tensors these would be
                self.parts[first, last] = part
        return part

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` with this weight; what autocast made of x becomes fp32 again.

        Raises:
            RuntimeError: a gradient would be asked of x or of the bias; or x is not fp32 `[..., K]` on the CPU.
        """
        learns = x.requires_grad or (bias is not None and bias.requires_grad)
        if (learns and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            raise RuntimeError("packed weights have no gradients: call the model under torch.no_grad()")
        if autocasts(x):
            with torch.autocast("cpu", enabled=False):  # which would round a product by columns
                return self.linear(x.float(), bias)
        if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1:] != (self.columns,):
            raise RuntimeError(
                f"packed weights take fp32 [..., {self.columns}] on the CPU, not {x.dtype} {list(x.shape)} "
                f"on {x.device}"
            )
        return self.product(x, bias) if x.dim() > 1 else self.product(x[None], bias)[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({len(self)} x {self.columns})"

    def __deepcopy__(self, known: dict[int, Any]) -> "PackedWeight":
        return self  # nothing changes it

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("packed weights cannot be saved: save the model before pack_weights")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), PackedWeight):
            return _linear(*args, **kwargs)
        self = args[0] if args else None
        if isinstance(self, PackedWeight):
            if function is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
                return self.rows(*args[1].indices(len(self))[:2])
            if function is Tensor.split_with_sizes and len(args) == 2:
                return tuple(self.rows(*bounds) for bounds in pairwise(accumulate(args[1], initial=0)))
            if function is Tensor.detach:
                return self
            if function in _NEW:
                return function(torch.empty(0, device="cpu"), *args[1:], **kwargs)
            # `module.float()` sets a parameter's data to itself.
            if function in _OF_MEMORY or (function == _SET_DATA and args[1] is not self):
                raise TypeError("packed weights cannot be saved, shared or set: do so before pack_weights")
        # Tensor's own would make packed weights of results: under torch.jit.trace the sizes of a shape are tensors.
        return nn.Parameter.__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"packed weights are for products alone, not for {function}")


def _linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)


class _Float32(PackedWeight):
    blocks: Tensor | None  # in the order of oneDNN
    by_columns: Tensor | None  # where there are none, and where one row has asked

    @classmethod
    def of(cls, weight: Tensor) -> "PackedWeight":
        made = cast(_Float32, cls.empty(*weight.shape))
        large = _has_blocks(weight)
        made.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, _FEWEST) if large else None
        made.by_columns = None if large else _by_columns(weight)
        return made

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        looked_at = watched()  # what is made here would be the watcher's, and torch.func has no rule for oneDNN's op
        if self.blocks is None or (looked_at and (self.by_columns is not None or transformed())):
            return F.linear(x, self._values(), bias)
        _check_untraced()
        D, K = self.outputs, self.columns
        M = x.numel() // K
        if M == 1 and D > K and not looked_at:
            if self.by_columns is None:
                self.by_columns = _by_columns(self._values())
            return F.linear(x, self.by_columns, bias)
        if bias is not None and (bias.shape != (D,) or bias.stride() != (1,)):  # D numbers in a row are read
            return self.product(x, None).add_(bias)
        if M >= _FEWEST:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self.blocks, bias, "none", [], ""))
        rows = x.reshape(M, K)
        padded = rows.expand(_FEWEST, K) if M == 1 else F.pad(rows, (0, 0, 0, _FEWEST - M))
        out = torch.ops.mkldnn._linear_pointwise(padded, self.blocks, bias, "none", [], "")
        return cast(Tensor, out[:M].view(*x.shape[:-1], D))

    def cut(self, first: int, last: int) -> PackedWeight:
        return self.of(self._values()[first:last])

    def _values(self) -> Tensor:
        if self.by_columns is not None:
            return self.by_columns
        assert self.blocks is not None
        return self.blocks.to_dense()


def _by_columns(weight: Tensor) -> Tensor:
    return weight.t().clone(memory_format=torch.contiguous_format).t()


def _has_blocks(weight: Tensor) -> bool:
    return _BLOCKS and weight.numel() >= _LEAST and bool(torch.backends.mkldnn.enabled)


class _BFloat16(PackedWeight):
    rounded: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "PackedWeight":
        made = cast(_BFloat16, cls.empty(*weight.shape))
        made.rounded = weight.bfloat16()
        return made

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(x.bfloat16(), self.rounded).float()
        return out if bias is None else out.add_(bias)

    def cut(self, first: int, last: int) -> PackedWeight:
        return self.of(self.rounded[first:last])


class _Int8(PackedWeight):
    rounded: Tensor  # int8 [D, K]
    scales: Tensor  # fp32 [D]
    packed: Any

    @classmethod
    def of(cls, weight: Tensor) -> "PackedWeight":
        # A row of zeros has no scale of its own.
        scales = (weight.abs().amax(1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        values = (weight / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return cls.from_values(values, scales)

    @classmethod
    def from_values(cls, values: Tensor, scales: Tensor) -> "PackedWeight":
        """The weight of which row d is values[d] * scales[d]."""
        made = cast(_Int8, cls.empty(*values.shape))
        made.rounded, made.scales = values, scales
        with warnings.catch_warnings():  # that quantised tensors will go some day: this one is there to be packed
            warnings.simplefilter("ignore", UserWarning)
            try:
                zeros = torch.zeros(len(values), dtype=torch.int64, device="cpu")
                tensor = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
                made.packed = torch.ops.quantized.linear_prepack(tensor, None)
            except (AttributeError, RuntimeError) as error:
                raise RuntimeError(f"this PyTorch has no int8 kernels for this CPU: {error}") from error
        return made

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        _check_untraced()
        # 7 bits: where a CPU has no dot products of int8, sums of two products saturate at 16 bits. The kernels
        # pass NaN by where they look for the range, which makes a number of it (a look: 2.4 us for a row of 512).
        multiply = torch.ops.quantized.linear_dynamic
        if readable(x) and math.isfinite(x.sum().item()):
            out = cast(Tensor, multiply(x, self.packed, True))
        else:
            lost = ~x.isfinite().all(-1, keepdim=True)
            out = multiply(x.masked_fill(lost, 0.0), self.packed, True).masked_fill(lost, math.nan)
        return out if bias is None else out.add_(bias)

    def cut(self, first: int, last: int) -> PackedWeight:
        return self.from_values(self.rounded[first:last], self.scales[first:last])
