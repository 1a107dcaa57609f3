"""Fast path of unmodified layers for one-token decoding on a CPU: computes the same as a layer's `compose`.

A step is short: with one row it reads each weight once. The ops' checks of masks, modes and backends take a seventh of
the time (6 layers of width 512). `one_token` calls a few of torch's ops without these checks.

Letters: R rows, D model width, H heads of queries, Hkv of keys and values, K head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.functional.choice import runs_fused
from fastformer.functional.feed_forward.op import activate
from fastformer.host.devices import autocasts
from fastformer.modes import watched
from fastformer.nn.inference_weights import PackedWeight
from fastformer.nn.inspection import has_own_hooks
from fastformer.nn.kv_write import KVWrite, LayerCache
from fastformer.nn.modules import DROP_INS, activation_name
from fastformer.nn.projections import OUT_PROJECTIONS
from fastformer.nn.rotary import Positions


def has_fast_path(stack: Any, x: Tensor, cache: Any) -> bool:
    """Return whether a step with new tokens x `[R, t, D]` may use `one_token`.

    It has one token a row and no mode is active; the stack and its layers are unmodified, have no options that
    `one_token` lacks, and apply no dropout.
    """
    if type(x) is not Tensor or not x.is_cpu or x.shape[1] != 1 or not cache.rows:
        return False
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != cache.layers[0].keys.dtype:
        return False  # the ops add up narrower dtypes in wider ones
    if watched() or autocasts(x) or runs_fused("attention", x) or has_own_hooks(stack):
        return False
    return all(_is_supported(layer) for layer in stack.layers)


def _is_supported(layer: Any) -> bool:
    modules = layer._modules
    if type(layer) not in DROP_INS.values() or has_own_hooks(layer):
        return False
    if len(layer.plain_parts()) != len(modules) - ("activation" in modules):
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
    """Run a layer on one new token of each row: `[R, D]` -> `[R, D]`.

    Args:
        layer: of a stack for which `has_fast_path` is True.
        x: the tokens.
        layer_cache: keys and values of the layer.
        write: how the new keys and values are written.
        cache: the whole cache, of all layers.
    """
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
    H, Hkv, K = attention.num_heads, attention.kv_heads, attention.head_dim
    weight, bias = _parameter(attention, "in_proj_weight"), _parameter(attention, "in_proj_bias")
    qkv = _product(x, weight, bias).view(x.shape[0], 1, H + 2 * Hkv, K)
    if attention.rotary is None:
        q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], 2)
    else:
        qk, v = qkv.split_with_sizes([H + Hkv, Hkv], 2)
        q, k = attention.turn(qk, Positions(write.index, write.end)).split_with_sizes([H, Hkv], 2)
    keys, values = write.write(layer_cache, k, v)
    return _attend(attention, q, keys, values, write.mask(q))


def _memory_attention(attention: Any, x: Tensor, layer_cache: LayerCache, cache: Any) -> Tensor:
    """Attend from x `[R, D]` to the memory of each row's sentence."""
    keys, values = layer_cache.memory  # type: ignore[misc]
    H, K = attention.num_heads, attention.head_dim
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
