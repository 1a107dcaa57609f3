"""Inference through unmodified layers: one token a row on a CPU, and packed tokens in kernels.

Both compute what the layers' `compose` does, by few ops and without the checks of each module and op. On a CPU the
checks take a seventh of the time of a step (6 layers of width 512). With kernels they take more than half of the host's
time of an encoder's layers.

Letters: T packed tokens, R rows of a cache, N hypotheses a sentence, D model width, H heads of queries, Hkv of keys and
values, K head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.backend import get_backend
from fastformer.functional.attention.fused import LARGEST_HEAD, packed_attention_kernel
from fastformer.functional.choice import on_plain_cores, runs_fused
from fastformer.functional.feed_forward.op import activate, activate_kernel
from fastformer.functional.norms.fused import add_norm_kernel
from fastformer.host.devices import autocasts
from fastformer.modes import needs_dispatcher
from fastformer.nn.inspection import has_own_hooks, is_unmodified, runs_composed, unmodified_children
from fastformer.nn.kv_write import KVWrite, LayerCache
from fastformer.nn.modules import DROP_INS, NORMS, activation_name
from fastformer.nn.packed_weights import PackedWeight
from fastformer.nn.projections import OUT_PROJECTIONS
from fastformer.nn.rotary import Positions
from fastformer.packing import Layout

Attention = Callable[[Tensor], Tensor]  # normalised input -> attention output


def _run(
    stack: Any,
    x: Tensor,
    attentions: Callable[[int, Any], tuple[Attention, ...]],
    add_norm: Callable[[nn.Module, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    activate: Callable[[Tensor, Any], Tensor],
) -> Tensor:
    """Run the layers of a stack, then its norm: `[T, D]` -> `[T, D]`.

    Args:
        attentions: returns a function for each attention of a layer, from the layer and its index.
        add_norm: returns norm(x + residual), and the sum.
        activate: applies an activation by its name in `functional.feed_forward`.
    """
    residual: Tensor | None = None  # not yet added to x; the next norm adds it
    for index, layer in enumerate(stack.layers):
        modules = layer._modules
        for number, attend in enumerate((*attentions(index, layer), None), start=1):
            norm = modules[f"norm{number}"]
            run = partial(_feed_forward, layer, activate) if attend is None else attend
            if layer.norm_first:
                normalised, residual = add_norm(norm, x, residual)
                x = run(normalised)
            else:
                if residual is not None:  # of a pre-norm layer before this one
                    x, residual = residual + x, None
                x, _ = add_norm(norm, run(x), x)
    if stack.norm is not None:
        return add_norm(stack.norm, x, residual)[0]
    return x if residual is None else residual + x


def _has_unmodified_layers(stack: Any) -> bool:
    norm = stack.norm
    fits = norm is None or (is_unmodified(norm, *NORMS) and len(norm.normalized_shape) == 1)
    return fits and not has_own_hooks(stack) and all(map(_is_supported, stack.layers))


def _is_supported(layer: Any) -> bool:
    """Return whether `_run` computes the layer: unmodified, without dropout, without options it lacks."""
    modules = layer._modules
    if type(layer) not in DROP_INS.values() or not runs_composed(layer) or has_own_hooks(layer):
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


def _feed_forward(layer: Any, activate: Callable[[Tensor, Any], Tensor], x: Tensor) -> Tensor:
    modules, activation = layer._modules, layer.activation
    x, name = _linear(x, modules["linear1"]), activation_name(activation)
    x = activation(x) if name is None else activate(x, name)  # frees its input before the next product
    return _linear(x, modules["linear2"])


def _linear(x: Tensor, module: nn.Module) -> Tensor:
    return _product(x, _parameter(module, "weight"), _parameter(module, "bias"))


def _product(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return weight.linear(x, bias) if isinstance(weight, PackedWeight) else F.linear(x, weight, bias)


def _parameter(module: nn.Module, name: str) -> Any:
    parameters = module._parameters  # not `__getattr__`, which takes 0.4 us
    return parameters[name] if name in parameters else getattr(module, name)


# One token a row, on a CPU


def takes_one_token(stack: Any, x: Tensor, cache: Any) -> bool:
    """Return whether `run_one_token` may run a step with new tokens x `[R, t, D]` on a CPU: one a row, and no mode."""
    if type(x) is not Tensor or not x.is_cpu or x.shape[1] != 1 or not cache.rows:
        return False
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != cache.layers[0].keys.dtype:
        return False  # `compose` accumulates narrower dtypes in wider ones
    if needs_dispatcher() or autocasts(x) or runs_fused("attention", x):
        return False
    return _has_unmodified_layers(stack)


def run_one_token(stack: Any, x: Tensor, write: KVWrite, cache: Any) -> Tensor:
    """Run a stack that `takes_one_token` on the new token of each row: `[R, D]` -> `[R, D]`."""

    def attentions(index: int, layer: Any) -> tuple[Attention, ...]:
        modules, layer_cache = layer._modules, cache.layers[index]
        own = partial(_self_attention, modules["self_attn"], layer_cache, write)
        if layer_cache.memory is None:
            return (own,)
        return own, partial(_memory_attention, modules["multihead_attn"], layer_cache, cache)

    return _run(stack, x, attentions, _add_norm, _activate)


def _self_attention(attention: Any, layer_cache: LayerCache, write: KVWrite, x: Tensor) -> Tensor:
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


def _memory_attention(attention: Any, layer_cache: LayerCache, cache: Any, x: Tensor) -> Tensor:
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


def _add_norm(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    x, (weight, bias) = x if residual is None else residual + x, _parameters_of(norm)
    if any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
        return norm(x), x  # the module widens a narrower dtype
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps), x
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps), x


def _activate(hidden: Tensor, name: Any) -> Tensor:
    return F.relu_(hidden) if name == "relu" else activate(hidden, name)


# Packed tokens, in kernels


def takes_packed(
    stack: Any,
    x: Tensor,
    layout: Layout,
    causal: bool,
    mask: Tensor | None,
    memory: Tensor | None = None,
    memory_layout: Layout | None = None,
    memory_mask: Tensor | None = None,
) -> bool:
    """Return whether `run_packed` may run packed tokens x `[T, D]`: without masks, modes and gradients.

    False as well where "auto" may pass attention to SDPA. Arguments are those of the layers' `packed_attentions`.
    """
    if torch.is_grad_enabled() or needs_dispatcher() or not (mask is None and memory_mask is None):
        return False
    has_memory = memory is not None or memory_layout is not None
    sides = [(x, layout), (memory, memory_layout)] if has_memory else [(x, layout)]
    for tokens, side_layout in sides:
        if not isinstance(side_layout, Layout) or side_layout.batch != layout.batch:
            return False
        if type(tokens) is not Tensor or tokens.shape != (side_layout.total, x.shape[-1]) or not tokens.numel():
            return False
        if tokens.dtype != x.dtype or not tokens.device == side_layout.offsets.device == x.device:
            return False
    ops = "layer_norm", "feed_forward", "packed_attention"
    if autocasts(x) or not all(runs_fused(op, x) for op in ops) or not _has_unmodified_layers(stack):
        return False
    modules = [layer._modules for layer in stack.layers]
    if not modules or any(("multihead_attn" in each) != has_memory for each in modules):
        return False
    attentions = [each[name] for each in modules for name in ("self_attn", "multihead_attn") if name in each]
    head_size = max(a.in_proj_weight.shape[0] // (a.num_heads + 2 * a.kv_heads) for a in attentions)
    if head_size > LARGEST_HEAD:
        return False
    if get_backend() == "auto" and (layout.full or on_plain_cores(x, head_size)):
        return False
    norms = [each[name] for each in modules for name in ("norm1", "norm2", "norm3") if name in each]
    return all(_fits(norm, x) for norm in (*norms, *([] if stack.norm is None else [stack.norm])))


def _fits(norm: Any, x: Tensor) -> bool:
    """Return whether the kernels, which read a norm's parameters by their addresses, may do so for x."""
    parameters = [p for p in _parameters_of(norm) if p is not None]
    if norm.normalized_shape != x.shape[1:] or any(p.shape != x.shape[1:] for p in parameters):
        return False
    return all(p.device == x.device and p.dtype == x.dtype and p.is_contiguous() for p in parameters)


def _parameters_of(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    return _parameter(norm, "weight"), None if isinstance(norm, nn.RMSNorm) else _parameter(norm, "bias")


def run_packed(
    stack: Any,
    x: Tensor,
    layout: Layout,
    causal: bool,
    mask: None,
    memory: Tensor | None = None,
    memory_layout: Layout | None = None,
    memory_mask: None = None,
) -> Tensor:
    """Run a stack that `takes_packed` on packed tokens in kernels: `[T, D]` -> `[T, D]`; arguments are the same."""

    def attentions(_: int, layer: Any) -> tuple[Attention, ...]:
        modules = layer._modules
        own = partial(_attend_packed, modules["self_attn"], layout, layout, causal, None)
        if memory_layout is None:
            return (own,)
        return own, partial(_attend_packed, modules["multihead_attn"], layout, memory_layout, False, memory)

    return _run(stack, x, attentions, _add_norm_kernel, activate_kernel)


def _attend_packed(
    attention: Any, layout: Layout, key_layout: Layout, causal: bool, memory: Tensor | None, x: Tensor
) -> Tensor:
    attention.check_layouts(layout, key_layout)
    memory = x if memory is None else memory
    positions, key_positions = (Positions(each.positions, each.max_length) for each in (layout, key_layout))
    q, k, v = attention.project(x, memory, memory, positions, key_positions)
    out = packed_attention_kernel(q, k, v, layout, key_layout, causal)
    return _linear(out.flatten(1), attention._modules["out_proj"])


def _add_norm_kernel(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    if residual is not None and x.shape != residual.shape:
        x = residual + x  # a replaced linear layer may have another width
        return norm(x), x
    return add_norm_kernel(x, residual, *_parameters_of(norm), norm.eps, not isinstance(norm, nn.RMSNorm))
