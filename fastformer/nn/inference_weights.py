"""Weights for inference on a CPU, where a product of few rows takes as long as its weights to be read.

**By columns** (`columns_first`): the same numbers in the order in which MKL reads them best for a few rows.

**In fewer bits** (`narrow_weights`). `int8`: a scale for each row of a weight; the other factor is rounded to 7 bits in
each call, with one scale for all of it, so that a result depends on what else is in the batch (PyTorch's dynamic
kernels, which add up in int32), and a row that is not finite gives NaN. `bf16`: both factors and the result are rounded
to bf16, sums are fp32. All else stays in fp32: biases, norms, embeddings, softmax and attention's products.

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

from fastformer.host.devices import autocasts
from fastformer.modes import forward_ad, readable
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.settings import check_value

PRECISIONS = ("fp32", "bf16", "int8")
_NEW = (Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros, Tensor.new_tensor)
# What reads, shares or replaces memory, of which there is none: torch's own would read address 0, or change nothing.
_OF_MEMORY = (Tensor.data_ptr, Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LARGEST = 127  # of int8; -128 stays out, so that a weight and its negative round alike


def narrow_weights(model: nn.Module, precision: str) -> None:
    """Round the weights of a model's linear maps and of attention's projections, in place, for inference on a CPU.

    Changed are nn.Linear and fastformer's MultiheadAttention, not subclasses and parametrised ones, nor torch's
    attention, whose function takes no such weights; a weight that an embedding shares stays in fp32 there. Afterwards
    the model can neither be trained nor saved, cast or moved.

    Args:
        model: in fp32, on the CPU.
        precision: "fp32" changes nothing.

    Raises:
        ValueError: precision is none of the three, or the model is of another dtype or on another device.
        RuntimeError: this PyTorch has no int8 kernels.
    """
    check_value("precision", precision, str, choices=PRECISIONS)
    if precision == "fp32":
        return
    for name, x in model.named_parameters():
        if x.dtype != torch.float32 or not x.is_cpu:
            raise ValueError(f"model must be in fp32 on a CPU for {precision}, and {name} is {x.dtype} on {x.device}")
    narrow = _Int8 if precision == "int8" else _BFloat16
    others = [
        its for its in model.modules() if isinstance(its, nn.MultiheadAttention) and type(its) is not MultiheadAttention
    ]
    kept = {id(part) for attention in others for part in attention.modules()}
    for module in model.modules():
        for name in () if id(module) in kept else _weights_of(module):
            weight = module._parameters.get(name)
            if weight is not None and weight.numel() and not isinstance(weight, NarrowWeight):
                module._parameters[name] = cast(nn.Parameter, narrow.of(weight.detach()))
                if not hasattr(module, "__prepare_scriptable__"):  # torch.jit would save the weight's memory: zeros
                    module.__dict__["__prepare_scriptable__"] = _refuse_script


def columns_first(model: nn.Module) -> None:
    """Store the weights of a model's linear maps and of attention's projections by columns, in place; fp32 on a CPU.

    Greedy search of one row is 1.08 times as fast, of 8 rows 1.09, of 32 as fast (d512, 6+6 layers, one core). Shapes
    and numbers stay, state dicts too. A weight that an embedding shares is copied, as an embedding reads rows: so the
    model is no longer to be trained.
    """
    shared = {id(x) for module in model.modules() if isinstance(module, nn.Embedding) for x in module.parameters()}
    for module in model.modules():
        for name in _weights_of(module):
            weight = module._parameters.get(name)
            if type(weight) is not nn.Parameter or weight.dtype != torch.float32 or not weight.is_cpu:
                continue
            by_columns = weight.detach().t().contiguous().t()
            if id(weight) in shared:
                module._parameters[name] = nn.Parameter(by_columns, weight.requires_grad)
            else:
                weight.data = by_columns


def _weights_of(module: nn.Module) -> tuple[str, ...]:
    if type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
        return ("weight",)
    if type(module) in (nn.MultiheadAttention, MultiheadAttention):
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ()


def _refuse_script() -> NoReturn:
    raise TypeError("weights of bf16 and int8 cannot be compiled by torch.jit.script: do so before narrow_weights")


class NarrowWeight(Tensor):
    """A weight `[D, K]` that says fp32 and is kept in fewer bits: to be multiplied, or cut between rows."""

    parts: dict[tuple[int, int], "NarrowWeight"]
    columns: int

    @classmethod
    def empty(cls, rows: int, columns: int) -> "NarrowWeight":
        """One of this shape, without values."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), dtype=torch.float32, device=torch.device("cpu")
        )
        made.parts, made.columns = {}, columns
        return made

    @classmethod
    def of(cls, weight: Tensor) -> "NarrowWeight":
        """Round a weight."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """x, fp32 of at least two dimensions `[..., K]`, times the weight: `[..., D]`."""
        raise NotImplementedError

    def cut(self, first: int, last: int) -> "NarrowWeight":
        """The weight of these rows, without remembering it."""
        raise NotImplementedError

    def rows(self, first: int, last: int) -> "NarrowWeight":
        """Rows first to last - 1; each part is made once."""
        if (first, last) not in self.parts:
            self.parts[first, last] = self.cut(first, last)
        return self.parts[first, last]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` with this weight; what autocast made of x becomes fp32 again.

        Raises:
            RuntimeError: a gradient would be asked of x or of the bias; or x is not fp32 `[..., K]` on the CPU.
        """
        learns = x.requires_grad or (bias is not None and bias.requires_grad)
        if (learns and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
            raise RuntimeError("weights of bf16 and int8 have no gradients: call the model under torch.no_grad()")
        x = x.float() if autocasts(x) else x
        if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1:] != (self.columns,):
            raise RuntimeError(
                f"weights of bf16 and int8 take fp32 [..., {self.columns}] on the CPU, not {x.dtype} {list(x.shape)} "
                f"on {x.device}"
            )
        out = self.product(x) if x.dim() > 1 else self.product(x[None])[0]
        return out if bias is None else out.add_(bias)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({len(self)} x {self.columns})"

    def __deepcopy__(self, known: dict[int, Any]) -> "NarrowWeight":
        return self  # nothing changes it

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("weights of bf16 and int8 cannot be saved: save the model before it is narrowed")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and isinstance(args[1] if len(args) > 1 else kwargs.get("weight"), NarrowWeight):
            return _linear(*args, **kwargs)
        self = args[0] if args else None
        if isinstance(self, NarrowWeight):
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
                raise TypeError("weights of bf16 and int8 cannot be saved, shared or set: do so before narrow_weights")
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"weights of bf16 and int8 are for products alone, not for {function}")


def _linear(input: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)


class _BFloat16(NarrowWeight):
    rounded: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "NarrowWeight":
        made = cast(_BFloat16, cls.empty(*weight.shape))
        made.rounded = weight.bfloat16()
        return made

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.rounded).float()

    def cut(self, first: int, last: int) -> NarrowWeight:
        return self.of(self.rounded[first:last])


class _Int8(NarrowWeight):
    rounded: Tensor  # int8 [D, K]
    scales: Tensor  # fp32 [D]
    packed: Any

    @classmethod
    def of(cls, weight: Tensor) -> "NarrowWeight":
        # A row of zeros has no scale of its own.
        scales = (weight.abs().amax(1) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        values = (weight / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        return cls.from_values(values, scales)

    @classmethod
    def from_values(cls, values: Tensor, scales: Tensor) -> "NarrowWeight":
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

    def product(self, x: Tensor) -> Tensor:
        # 7 bits: where a CPU has no dot products of int8, sums of two products saturate at 16 bits. The kernels
        # pass NaN by where they look for the range, which makes a number of it (a look: 2.4 us for a row of 512).
        multiply = torch.ops.quantized.linear_dynamic
        if readable(x) and math.isfinite(x.sum().item()):
            return cast(Tensor, multiply(x, self.packed, True))
        lost = ~x.isfinite().all(-1, keepdim=True)
        return cast(Tensor, multiply(x.masked_fill(lost, 0.0), self.packed, True)).masked_fill(lost, math.nan)

    def cut(self, first: int, last: int) -> NarrowWeight:
        return self.from_values(self.rounded[first:last], self.scales[first:last])
