"""Inference on a CPU: weights in the order that matrix products read fastest, and one-token decoding.

`pack_weights` stores fp32 weights by columns, and copies large ones into oneDNN's blocks too: 4 to 128 rows then take a
third to nine tenths of MKL's time on an AMD CPU. Products of a large weight with one row read its columns where D > K.

`one_token` runs an unmodified layer as its `compose` does, by a few of torch's ops without the checks that take a
seventh of the time (6 layers of width 512).

Letters: M or R rows, D model width or outputs, H heads of queries, Hkv of keys and values, K head size or inputs.
"""

from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastformer.functional.choice import runs_fused
from fastformer.functional.feed_forward.op import activate
from fastformer.host.devices import autocasts
from fastformer.modes import needs_dispatcher, without_subclasses
from fastformer.nn.inspection import has_own_hooks, unmodified_children
from fastformer.nn.kv_write import KVWrite, LayerCache
from fastformer.nn.modules import DROP_INS, activation_name
from fastformer.nn.projections import OUT_PROJECTIONS
from fastformer.nn.rotary import Positions

# The op that torch.compile uses for linear layers with frozen weights.
_BLOCKS = hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Rows that weights are packed for and inputs padded to, because oneDNN is slower with fewer: weights of 512 x 2048 with
# 1 row took 322 us, padded 243 (by MKL 402).
_MIN_ROWS = 4
# Elements of a packed weight: a call of oneDNN takes 20 us more, and the first call with each number of rows 650 us.
_MIN_PACKED_SIZE = 1 << 18
_MAX_SLICES = 8  # cached slices of a weight: attention reads those of queries, keys, values, and keys with values


def pack_weights(model: nn.Module) -> None:
    """Pack the weights of a model's linear layers and attention projections, in place, for inference on a CPU.

    Packed are fp32 weights on the CPU, of nn.Linear and fastformer's MultiheadAttention, not of subclasses. A large
    weight is stored twice. The model can still be saved, moved and trained. An embedding that shares a weight keeps the
    original parameter.
    """
    attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    unpacked = [x for x in attentions if type(x) is not DROP_INS[nn.MultiheadAttention]]
    skipped = {id(module) for attention in unpacked for module in attention.modules()}
    packed = WeakTensorKeyDictionary()  # a weight that several modules share is packed once
    for module in model.modules():
        for name in () if id(module) in skipped else _weights_of(module):
            weight = module._parameters.get(name)
            if weight is None or isinstance(weight, PackedWeight):
                continue
            if weight.dtype == torch.float32 and weight.is_cpu:
                if weight not in packed:
                    with torch.inference_mode(False):
                        by_columns = weight.detach().t().clone(memory_format=torch.contiguous_format).t()
                    large = _BLOCKS and weight.numel() >= _MIN_PACKED_SIZE
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
    copies: dict[object, Tensor]  # of values at `state`: the blocks at None, slices at (first row, last row)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear` with this weight."""
        with without_subclasses():
            D, K = self.shape
            M = x.numel() // max(K, 1)
            supported = type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and x.dim() > 1 and x.shape[-1] == K
            # oneDNN reads D consecutive numbers of the bias.
            supported = supported and (bias is None or (bias.shape == (D,) and bias.stride() == (1,)))
            if not supported or M == 0 or (M == 1 and D > K) or autocasts(x) or not self._may_read_copies(x, bias):
                return F.linear(x, self, bias)
            blocks = self._blocks()
            if M >= _MIN_ROWS:
                return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], ""))
            rows = x.reshape(M, K)
            padded = rows.expand(_MIN_ROWS, K) if M == 1 else F.pad(rows, (0, 0, 0, _MIN_ROWS - M))
            out = torch.ops.mkldnn._linear_pointwise(padded, blocks, bias, "none", [], "")
            return cast(Tensor, out[:M].view(*x.shape[:-1], D))

    def _may_read_copies(self, *tensors: Tensor | None) -> bool:
        """Return whether no gradient is needed, and no mode observes single operations."""
        learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (self, *tensors))
        return not learns and not needs_dispatcher() and bool(torch.backends.mkldnn.enabled)

    def _current_copies(self) -> dict[object, Tensor]:
        """Return the copies of the parameter's present values; discard copies of earlier ones."""
        state = self.data_ptr(), self._version
        if self.__dict__.get("state") != state:
            self.state, self.copies = state, {}
        return self.copies

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
        if isinstance(self, PackedWeight) and len(args) == 2 and self._may_read_copies():
            if function is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
                return self._rows(*args[1].indices(len(self))[:2])
            if function is Tensor.split_with_sizes:
                return tuple(self._rows(*bounds) for bounds in pairwise(accumulate(args[1], initial=0)))
        with without_subclasses():
            return function(*args, **kwargs)


def _packed_linear(input: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)


def has_fast_path(stack: Any, x: Tensor, cache: Any) -> bool:
    """Return whether a step with new tokens x `[R, t, D]` may use `one_token`.

    It has one token a row and no mode is active; the stack and its layers are unmodified, have no options that
    `one_token` lacks, and apply no dropout.
    """
    if type(x) is not Tensor or not x.is_cpu or x.shape[1] != 1 or not cache.rows:
        return False
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != cache.layers[0].keys.dtype:
        return False  # the ops add up narrower dtypes in wider ones
    if needs_dispatcher() or autocasts(x) or runs_fused("attention", x) or has_own_hooks(stack):
        return False
    return all(_is_supported(layer) for layer in stack.layers)


def _is_supported(layer: Any) -> bool:
    modules = layer._modules
    if type(layer) not in DROP_INS.values() or has_own_hooks(layer):
        return False
    if len(unmodified_children(layer, layer.part_types)) != len(modules) - ("activation" in modules):
        return False
    for name in ("self_attn", "multihead_attn"):
        if (attention := modules.get(name)) is None:
            continue
        if attention.has_sinks or attention.by_distance or attention.softcap is not None or attention.training:
            return False
        if attention.bias_k is not None or attention.add_zero_attn or not attention._qkv_same_embed_dim:
            return False
        out_proj = attention._modules["out_proj"]
        if len(attention._modules) > 1 or type(out_proj) not in OUT_PROJECTIONS or has_own_hooks(out_proj):
            return False
    return not any(child.training for child in modules.values() if type(child) is nn.Dropout)


def one_token(layer: Any, x: Tensor, layer_cache: LayerCache, write: KVWrite, cache: Any) -> Tensor:
    """Run a layer of a stack that `has_fast_path` on one new token of each row: `[R, D]` -> `[R, D]`."""
    modules = layer._modules
    steps: list[Any] = [
        lambda x: _self_attention(modules["self_attn"], x, layer_cache, write),
        lambda x: _feed_forward(layer, x),
    ]
    if "multihead_attn" in modules:
        steps.insert(1, lambda x: _memory_attention(modules["multihead_attn"], x, layer_cache, cache))
    for number, step in enumerate(steps, start=1):
        norm = modules[f"norm{number}"]
        x = x + step(_norm(norm, x)) if layer.norm_first else _norm(norm, x + step(x))
    return x


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    modules, activation = layer._modules, layer.activation
    hidden, name = _linear(x, modules["linear1"]), activation_name(activation)
    if name is None:
        hidden = activation(hidden)
    else:
        hidden = F.relu_(hidden) if name == "relu" else activate(hidden, name)
    return _linear(hidden, modules["linear2"])


def _self_attention(attention: Any, x: Tensor, layer_cache: LayerCache, write: KVWrite) -> Tensor:
    """Write keys and values of x `[R, D]` into the cache; attend to all tokens of each row."""
    H, Hkv = attention.num_heads, attention.kv_heads
    weight, bias = _parameter(attention, "in_proj_weight"), _parameter(attention, "in_proj_bias")
    qkv = _product(x, weight, bias).view(x.shape[0], 1, H + 2 * Hkv, -1)
    if attention.rotary is None:
        q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], 2)
    else:
        qk, v = qkv.split_with_sizes([H + Hkv, Hkv], 2)
        q, k = attention.rotate(qk, Positions(write.index, write.end)).split_with_sizes([H, Hkv], 2)
    keys, values = write.write(layer_cache, k, v)
    return _attend(attention, q, keys, values, write.mask(q))


def _memory_attention(attention: Any, x: Tensor, layer_cache: LayerCache, cache: Any) -> Tensor:
    """Attend from x `[R, D]` to the memory of each row's sentence."""
    keys, values = layer_cache.memory  # type: ignore[misc]
    H, K = attention.num_heads, keys.shape[3]
    weight, bias = _parameter(attention, "in_proj_weight")[: H * K], _parameter(attention, "in_proj_bias")
    q = _product(x, weight, None if bias is None else bias[: H * K]).view(keys.shape[0], cache.hypotheses, H, K)
    return _attend(attention, q, keys, values, cache.memory_limits(q, keys.shape[2]).get("mask"))


def _attend(attention: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    grouped = {"enable_gqa": True} if keys.shape[1] != q.shape[2] else {}
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, **grouped)  # [B, H, N, K]
    return _linear(out.transpose(1, 2).reshape(-1, q.shape[2] * q.shape[3]), attention._modules["out_proj"])


def _linear(x: Tensor, module: nn.Module) -> Tensor:
    return _product(x, _parameter(module, "weight"), _parameter(module, "bias"))


def _product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return weight.linear(x, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    weight = _parameter(module, "weight")
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, weight, module.eps)
    return F.layer_norm(x, module.normalized_shape, weight, _parameter(module, "bias"), module.eps)


def _parameter(module: nn.Module, name: str) -> Any:
    parameters = module._parameters  # not `__getattr__`, which takes 0.4 us
    return parameters[name] if name in parameters else getattr(module, name)
