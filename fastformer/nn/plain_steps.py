"""Steps of one token a row through layers whose parts are all plain, on a CPU: what `compose` computes, unasked.

A step does little: at one row it reads each weight once. Beside that the questions of ops and layers (what is asked of
a mask, whether a part has hooks, which backend) are a seventh of it, so here they are asked of all parts at once, and
each sublayer is a few of torch's ops in a row. Whatever is not plain goes the general way, as does everything on
another device, on the kernels, under autocast, and where somebody looks on (`fastformer.modes`).

Letters: R rows, D model width, H heads of queries, Hkv of keys and values, K head size.
"""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.functional.choice import runs_fused
from fastformer.functional.feed_forward.op import activate
from fastformer.host.devices import autocasts
from fastformer.modes import compiling, dispatch_modes, functorch_level, tracing_state
from fastformer.nn.hooks import has_global_hooks, has_own_hooks
from fastformer.nn.inference_weights import PackedWeight
from fastformer.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from fastformer.nn.modules import activation_name
from fastformer.nn.multihead_attention import MultiheadAttention
from fastformer.nn.places import LayerCache, Limits, Together
from fastformer.nn.projections import OUT_PROJECTIONS, Positions
from fastformer.nn.sublayers import NORMS

_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (MultiheadAttention,),
    "multihead_attn": (MultiheadAttention,),
    "linear1": (nn.Linear,),
    "linear2": (nn.Linear,),
    "norm1": NORMS,
    "norm2": NORMS,
    "norm3": NORMS,
    "dropout": (nn.Dropout,),
    "dropout1": (nn.Dropout,),
    "dropout2": (nn.Dropout,),
    "dropout3": (nn.Dropout,),
}
_PARAMETERS: dict[type[nn.Module], tuple[str, ...]] = {
    MultiheadAttention: ("in_proj_weight", "in_proj_bias"),
    nn.Linear: ("weight", "bias"),
    nn.LayerNorm: ("weight", "bias"),
    nn.RMSNorm: ("weight",),
}


class PlainSteps:
    """The steps of a stack, as its parts were when a cache was made; `apply` says whether they still are.

    A copy of the cache, or of the model, has these no more where it is not the same parts any longer.
    """

    def __init__(self, stack: Any) -> None:
        self._layers = stack.layers
        self._steps = [_LayerStep(layer) for layer in stack.layers]
        self._dtype = next(stack.parameters()).dtype
        parts = [part for layer in stack.layers for part in layer.modules()]
        self._kinds = [(part, type(part)) for part in parts]
        self._children = [(part._modules, [*part._modules.values()]) for part in (stack.layers, *parts)]
        self._names = [(part._parameters, [*part._parameters]) for part in parts]
        # What an option, or a method in the instance, is kept as.
        options = [part.__dict__ for part in parts if isinstance(part, (*_LAYERS, MultiheadAttention))]
        self._options = [(state, [*state], [*state.values()]) for state in options]
        self._dropping = [part for part in parts if isinstance(part, nn.Dropout | MultiheadAttention)]

    @classmethod
    def of(cls, stack: Any) -> "PlainSteps | None":
        """Those of a stack; None where a part is not plain."""
        return cls(stack) if all(map(_is_plain, stack.layers)) and _is_of_one_dtype(stack.layers) else None

    def __deepcopy__(self, known: dict[int, Any]) -> "PlainSteps":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # of parts that the one who loads has not

    def apply(self, stack: Any, x: Tensor, kept: list[LayerCache]) -> bool:
        """Whether a step with x `[R, 1, D]` is the same by `run`."""
        if stack.layers is not self._layers or type(x) is not Tensor or not x.is_cpu:
            return False
        if not x.dtype == kept[0].keys.dtype == self._dtype:
            return False
        if compiling() or dispatch_modes() or functorch_level() is not None or tracing_state() is not None:
            return False
        if autocasts(x) or has_global_hooks() or has_own_hooks(stack):
            return False
        if runs_fused("attention", x) or any(part.training for part in self._dropping):
            return False
        if any(type(part) is not kind or has_own_hooks(part) for part, kind in self._kinds):
            return False
        for state, names, values in self._options:
            if [*state] != names or not all(map(is_, state.values(), values)):
                return False
        if any([*now] != then for now, then in self._names):
            return False
        return all([*now.values()] == then for now, then in self._children)

    def run(self, x: Tensor, kept: list[LayerCache], place: Together, memory: tuple[int, Limits]) -> Tensor:
        """Run the layers on the new tokens of all rows, `[R, 1, D]` -> `[R, 1, D]`.

        Args:
            kept: of each layer, what its rows have read.
            place: where the tokens go.
            memory: the hypotheses of a sentence, and what keeps queries from the padding of memories.
        """
        rows = x[:, 0]
        for step, its in zip(self._steps, kept, strict=True):
            rows = step(rows, its, place, memory)
        return rows[:, None]


def _is_plain(layer: Any) -> bool:
    """Whether a layer is ours, with nothing but torch's parts, and attention that `_LayerStep` knows."""
    if type(layer) not in _LAYERS or layer.has_own_blocks:
        return False
    for name, part in layer.named_children():
        if name != "activation" and type(part) not in _PARTS.get(name, ()):
            return False
    # `modules` behind the loop above: PEFT's attention changes its weights when it is asked for its modules.
    return all(map(_is_as_made, layer.modules())) and all(map(_is_plain_attention, layer.attentions))


def _is_as_made(part: nn.Module) -> bool:
    """Whether a part has its methods from its class, and what its class reads of it as parameters."""
    known = next((names for kind, names in _PARAMETERS.items() if isinstance(part, kind)), ())
    replaced = any(callable(getattr(type(part), name, None)) for name in part.__dict__)
    return not replaced and all(name in part._parameters for name in known)


def _is_plain_attention(attention: MultiheadAttention) -> bool:
    named = set(attention._modules) - {"out_proj"} or attention.has_sinks
    others = named or attention.by_distance or attention.softcap is not None
    whole = attention.in_proj_weight is not None and attention.packs
    return not others and whole and type(attention.out_proj) in OUT_PROJECTIONS


def _is_of_one_dtype(layers: nn.Module) -> bool:
    """Whether all parameters are on the CPU, in fp32 or in fp64; narrower ones are added up in wider dtypes."""
    found = {(x.dtype, x.device.type) for x in layers.parameters()}
    whole = all(type(x) is nn.Parameter or isinstance(x, PackedWeight) for x in layers.parameters())
    return whole and len(found) == 1 and found <= {(torch.float32, "cpu"), (torch.float64, "cpu")}


class _LayerStep:
    """One layer. Parameters are looked up where they are, in each step: they may be others by then."""

    def __init__(self, layer: Any) -> None:
        parts = layer._modules
        self.layer, self.norm_first = layer, layer.norm_first
        self.own = _AttentionStep(parts["self_attn"])
        cross = parts.get("multihead_attn")
        self.cross = None if cross is None else _AttentionStep(cross)
        self.norms = [_norm(parts[name]) for name in ("norm1", "norm2", "norm3") if name in parts]
        self.linear1, self.linear2 = _linear(parts["linear1"]), _linear(parts["linear2"])

    def __call__(self, x: Tensor, kept: LayerCache, place: Together, memory: tuple[int, Limits]) -> Tensor:
        norms = self.norms
        if self.norm_first:
            x = x + self.own.read(norms[0](x), kept, place)
            if self.cross is not None:
                x = x + self.cross.look_up(norms[1](x), kept, memory)
            return x + self._feed_forward(norms[-1](x))
        x = norms[0](x + self.own.read(x, kept, place))
        if self.cross is not None:
            x = norms[1](x + self.cross.look_up(x, kept, memory))
        return norms[-1](x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        activation = self.layer.activation
        hidden = self.linear1(x)
        match activation_name(activation):
            case None:
                hidden = activation(hidden)
            case "relu":
                hidden = F.relu_(hidden)
            case name:
                hidden = activate(hidden, name)
        return self.linear2(hidden)


class _AttentionStep:
    """Attention of one new token a row."""

    def __init__(self, attention: MultiheadAttention) -> None:
        self.attention = attention
        self.H, self.Hkv, self.K = attention.num_heads, attention.kv_heads, attention.head_dim
        self.grouped = {"enable_gqa": True} if self.Hkv != self.H else {}
        self.queries = _linear(attention, "in_proj_weight", "in_proj_bias", self.H * self.K)
        self.all = _linear(attention, "in_proj_weight", "in_proj_bias")
        self.out = _linear(attention.out_proj)

    def read(self, x: Tensor, kept: LayerCache, place: Together) -> Tensor:
        """Keep keys and values of x `[R, D]`; attend to all that its row has read."""
        H, Hkv, attention = self.H, self.Hkv, self.attention
        qkv = self.all(x).view(x.shape[0], 1, H + 2 * Hkv, self.K)
        if attention.rotary is None:
            q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], 2)
        else:
            qk, v = qkv.split_with_sizes([H + Hkv, Hkv], 2)
            q, k = attention.turn(qk, Positions(place.index, place.end)).split_with_sizes([H, Hkv], 2)
        keys, values = place.keep(kept, k, v)
        return self._attend(q.transpose(1, 2), keys, values, place.mask(q))

    def look_up(self, x: Tensor, kept: LayerCache, memory: tuple[int, Limits]) -> Tensor:
        """Attend from x `[R, D]` to the memory of each row's sentence."""
        assert kept.memory is not None
        keys, values = kept.memory
        hypotheses, limits = memory
        q = self.queries(x).view(keys.shape[0], hypotheses, self.H, self.K)
        return self._attend(q.transpose(1, 2), keys, values, limits(q, keys.shape[2]).get("mask"))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(q, keys, values, mask, **self.grouped)  # [B, H, N, K]
        return self.out(out.transpose(1, 2).reshape(-1, self.H * self.K))


def _linear(
    module: nn.Module, weight: str = "weight", bias: str = "bias", rows: int | None = None
) -> Callable[..., Tensor]:
    """The linear map of a module's parameters, or of their first rows."""
    parameters: dict[str, Any] = module._parameters

    def linear(x: Tensor) -> Tensor:
        w, b = parameters[weight], parameters[bias]
        if rows is not None:
            w, b = w[:rows], None if b is None else b[:rows]
        if isinstance(w, PackedWeight):
            return w.linear(x, b)
        return F.linear(x, w, b)

    return linear


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    parameters: dict[str, Any] = module._parameters

    def norm(x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, parameters["weight"], module.eps)
        return F.layer_norm(x, module.normalized_shape, parameters["weight"], parameters["bias"], module.eps)

    return norm
