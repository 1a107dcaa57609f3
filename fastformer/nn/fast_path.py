"""The fast paths of unmodified layers in inference on a CPU: cached steps of one token, and torch's op of a layer.

Both compute what `compose` of a layer computes. A cached step does little: at one row it reads each weight once. What
ops ask about masks, modes and backends takes a seventh of the time (6 layers of width 512), so `one_token` is a few of
torch's ops in a row. torch's op (`run_torchs_layer`) is for few tokens, and calls no overridden methods, adapters and
hooks.

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
from fastformer.nn.modules import activation_name
from fastformer.nn.projections import OUT_PROJECTIONS
from fastformer.nn.rotary import Positions

_ENCODER_PARTS = 8  # of an encoder layer


def runs_fast_path(x: Tensor, cache: Any) -> bool:
    """Return whether a step with x `[R, t, D]` may take the fast path, as far as x, cache and modes say."""
    if type(x) is not Tensor or not x.is_cpu or x.shape[1] != 1 or not cache.rows:
        return False
    if x.dtype not in (torch.float32, torch.float64) or x.dtype != cache.layers[0].keys.dtype:
        return False  # narrower numbers are added up in wider dtypes
    return not (watched() or autocasts(x) or runs_fused("attention", x))


def has_fast_path(layer: Any) -> bool:
    """Return whether a layer's parts are unmodified, without options that `one_token` does not know, and drop nothing.

    layer: of fastformer's classes, not of subclasses.
    """
    own = layer._modules
    if has_own_hooks(layer) or len(layer.plain_parts()) != len(own) - ("activation" in own):
        return False
    for name in ("self_attn", "multihead_attn"):
        attention = own.get(name)
        if attention is not None:
            others = len(attention._modules) > 1 or attention.has_sinks or attention.by_distance
            if others or attention.softcap is not None or attention.training:
                return False
            if attention.bias_k is not None or attention.add_zero_attn:
                return False
            out_proj = attention._modules["out_proj"]
            if not attention._qkv_same_embed_dim or type(out_proj) not in OUT_PROJECTIONS or has_own_hooks(out_proj):
                return False
    return not any(part.training for part in own.values() if type(part) is nn.Dropout)


def one_token(layer: Any, x: Tensor, kept: LayerCache, write: KVWrite, cache: Any) -> Tensor:
    """Run a layer on the new tokens of all rows: `[R, D]` -> `[R, D]`.

    Args:
        layer: with `has_fast_path`.
        x: the tokens.
        kept: what the layer keeps.
        write: where the tokens go.
        cache: the whole cache, of all layers.
    """
    own = layer._modules
    steps: list[Any] = [lambda x: _read(own["self_attn"], x, kept, write), lambda x: _feed_forward(layer, x)]
    if "multihead_attn" in own:
        steps.insert(1, lambda x: _look_up(own["multihead_attn"], x, kept, cache))
    for number, step in enumerate(steps, start=1):
        norm = own[f"norm{number}"]
        x = x + step(_norm(norm, x)) if layer.norm_first else _norm(norm, x + step(x))
    return x


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    own, activation = layer._modules, layer.activation
    hidden, name = _linear(x, own["linear1"]), activation_name(activation)
    if name is None:
        hidden = activation(hidden)
    else:
        hidden = F.relu_(hidden) if name == "relu" else activate(hidden, name)
    return _linear(hidden, own["linear2"])


def _read(attention: Any, x: Tensor, kept: LayerCache, write: KVWrite) -> Tensor:
    """Keep keys and values of x `[R, D]`; attend to all that its row has read."""
    H, Hkv, K = attention.num_heads, attention.kv_heads, attention.head_dim
    weight, bias = _parameter(attention, "in_proj_weight"), _parameter(attention, "in_proj_bias")
    qkv = _product(x, weight, bias).view(x.shape[0], 1, H + 2 * Hkv, K)
    if attention.rotary is None:
        q, k, v = qkv.split_with_sizes([H, Hkv, Hkv], 2)
    else:
        qk, v = qkv.split_with_sizes([H + Hkv, Hkv], 2)
        q, k = attention.turn(qk, Positions(write.index, write.end)).split_with_sizes([H, Hkv], 2)
    keys, values = write.write(kept, k, v)
    return _attend(attention, q, keys, values, write.mask(q))


def _look_up(attention: Any, x: Tensor, kept: LayerCache, cache: Any) -> Tensor:
    """Attend from x `[R, D]` to the memory of each row's sentence."""
    keys, values = kept.memory  # type: ignore[misc]
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
    own = module._parameters  # without `__getattr__`, which takes 0.4 us
    return own[name] if name in own else getattr(module, name)


def torchs_activation(layer: Any) -> int:
    """Return 1 for ReLU and 2 for GELU, as torch calls them; 0 where the layer is not what the op computes.

    layer: a `TransformerEncoderLayer`, not of a subclass.
    """
    known = {"relu": 1, "gelu": 2}.get(activation_name(layer.activation) or "", 0)
    own: Any = layer._modules
    if not known or any(own[name].training for name in ("dropout", "dropout1", "dropout2")):
        return 0
    if len(layer.plain_parts()) < _ENCODER_PARTS or not own["self_attn"].is_torchs_formula():
        return 0
    parts = [own[name]._parameters for name in ("linear1", "linear2", "norm1", "norm2")]
    return 0 if any(part.get(name) is None for part in parts for name in ("weight", "bias")) else known


def run_torchs_layer(layer: Any, src: Tensor) -> Tensor | None:
    """Run the op on src `[B, S, D]`; None where it does not compute what the layer does."""
    own: Any = layer._modules
    attention, norms = own["self_attn"], (own["norm1"], own["norm2"])
    known = layer.activation_relu_or_gelu
    if src.dim() != 3 or not known or not attention.batch_first or attention.num_heads % 2:
        return None
    if attention.training or norms[0].eps != norms[1].eps or attention.in_proj_bias is None:
        return None
    linears = attention.out_proj, own["linear1"], own["linear2"]
    attends = attention.in_proj_weight, attention.in_proj_bias, linears[0].weight, linears[0].bias
    others = [x for part in (*norms, *linears[1:]) for x in (part.weight, part.bias)]
    if any(type(x) is not nn.Parameter or x.dtype is not src.dtype for x in (*attends, *others)):
        return None
    sizes = attention.embed_dim, attention.num_heads
    return torch._transformer_encoder_layer_fwd(
        src, *sizes, *attends, known == 2, layer.norm_first, norms[0].eps, *others
    )
