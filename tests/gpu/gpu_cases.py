"""Every fused op at the sizes of real models, which a GPU runs in milliseconds. A new op is a new line.

`CASES[name](device, p)` gives an op, with dropout p where it has dropout, and its floating-point inputs, fp64 on the
CPU; what else it takes is on the device already. Names begin with the op's, for `functional.OPS`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fastformer import functional
from fastformer.packing import Layout
from tests.support.fused_op import Op

# No length is a multiple of a tile.
B, H, T, K = 4, 8, 1000, 64
M, D, FF, V = 4100, 512, 2048, 32_000
MANY = 32_768  # rows, so that memory for partial sums is small against what they are sums of

GpuCase = tuple[Op, list[Tensor]]


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return std * torch.randn(shape, dtype=torch.float64)


def lengths(device: str) -> Tensor:
    """One whole sequence, an empty one, and others."""
    return torch.tensor([T, 0, T // 3, T - 1], device=device)


def heads(length: int = 0, kv_heads: int = 0, size: int = 0) -> list[Tensor]:
    length, kv_heads, size = length or T, kv_heads or H, size or K
    return [normal(B, h, length, size) for h in (H, kv_heads, kv_heads)]


def attention(device: str, p: float) -> GpuCase:
    given = lengths(device)
    return lambda q, k, v: functional.attention(q, k, v, causal=True, key_lengths=given, dropout_p=p), heads()


def attention_gaps(device: str, p: float) -> GpuCase:
    mask = (torch.rand(B, T) < 0.7).to(device)
    return lambda q, k, v: functional.attention(q, k, v, key_mask=mask, dropout_p=p), heads(size=2 * K)


def attention_grouped(device: str, p: float) -> GpuCase:
    rules = {"causal": True, "window": (T // 4, None), "softcap": 30.0}
    return lambda q, k, v: functional.attention(q, k, v, **rules, dropout_p=p), heads(kv_heads=H // 4)


def attention_distances(device: str, p: float) -> GpuCase:
    return lambda q, k, v, bias, sinks: functional.attention(
        q, k, v, causal=True, dropout_p=p, distance_bias=bias, sinks=sinks
    ), [*heads(kv_heads=H // 4), normal(H, 2 * T + 99), normal(H)]


def attention_additive(device: str, p: float) -> GpuCase:
    return lambda q, k, v, mask: functional.attention(q, k, v, mask, dropout_p=p), [*heads(), normal(1, H, T, T)]


def attention_with_weights(device: str, p: float) -> GpuCase:
    given = lengths(device)
    return lambda q, k, v: functional.attention_with_weights(q, k, v, key_lengths=given, dropout_p=p), heads()


def packed_attention(device: str, p: float) -> GpuCase:
    layout = Layout.from_lengths([T, 1, T // 3, T - 1], device)
    inputs = [normal(layout.total, H, K) for _ in range(3)]
    return lambda q, k, v: functional.packed_attention(q, k, v, layout, causal=True, dropout_p=p), inputs


def layer_norm(rows: int, width: int) -> GpuCase:
    return lambda x, w, b: functional.layer_norm(x, width, w, b), [normal(rows, width), normal(width), normal(width)]


def rms_norm(rows: int, width: int) -> GpuCase:
    return lambda x, w: functional.rms_norm(x, width, w), [normal(rows, width), normal(width)]


def dropout_add_layer_norm(device: str, p: float) -> GpuCase:
    inputs = [normal(MANY, D), normal(MANY, D), normal(D), normal(D)]
    return lambda x, y, w, b: functional.dropout_add_layer_norm(x, y, D, w, b, dropout_p=p), inputs


def dropout_add_rms_norm(device: str, p: float) -> GpuCase:
    inputs = [normal(MANY, D), normal(MANY, D), normal(D)]
    return lambda x, y, w: functional.dropout_add_rms_norm(x, y, D, w, dropout_p=p), inputs


def feed_forward(activation: str, gates: int, p: float) -> GpuCase:
    shapes = [(M, D), (gates * FF, D), (gates * FF,), (D, FF), (D,)]
    inputs = [normal(*shape, std=1.0 if i == 0 else D**-0.5) for i, shape in enumerate(shapes)]
    return lambda *x: functional.feed_forward(*x, activation=activation, dropout_p=p), inputs


def embedding(device: str, p: float) -> GpuCase:
    ids, positions = torch.randint(V, (M,), device=device), (torch.arange(M) % T).to(device)
    inputs = [normal(V, D), normal(T, D)]
    return lambda w, t: functional.embedding(ids, w, t, positions, scale=D**0.5, dropout_p=p), inputs


def rotary(device: str, interleaved: bool) -> GpuCase:
    angles = torch.arange(T)[:, None] * 10000.0 ** -(torch.arange(K // 2) * 2 / K)
    positions, cos, sin = (x.to(device) for x in (torch.arange(M) % T, angles.cos(), angles.sin()))

    def op(x: Tensor) -> Tensor:  # queries and keys of a projection
        return functional.rotary(x[:, : H + 2], positions, cos, sin, interleaved=interleaved)

    return op, [normal(M, H + 4, K + 16)]


def linear_cross_entropy(device: str, reduction: str) -> GpuCase:
    target = torch.randint(V, (M,), device=device)
    target[::7] = -100

    def op(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x, w, target, b, label_smoothing=0.1, reduction=reduction)

    return op, [normal(M, D), normal(V, D, std=D**-0.5), normal(V)]


CASES: dict[str, Callable[[str, float], GpuCase]] = {
    "attention": attention,
    "attention, gaps": attention_gaps,
    "attention, grouped": attention_grouped,
    "attention, additive": attention_additive,
    "attention, by distance": attention_distances,
    "attention_with_weights": attention_with_weights,
    "packed_attention": packed_attention,
    "layer_norm": lambda device, p: layer_norm(MANY, D),
    "layer_norm, wide": lambda device, p: layer_norm(300, 32 * D),
    "rms_norm": lambda device, p: rms_norm(MANY, D),
    "rms_norm, wide": lambda device, p: rms_norm(300, 32 * D),
    "dropout_add_layer_norm": dropout_add_layer_norm,
    "dropout_add_rms_norm": dropout_add_rms_norm,
    "feed_forward": lambda device, p: feed_forward("gelu", 1, p),
    "feed_forward, gated": lambda device, p: feed_forward("swiglu", 2, p),
    "embedding": embedding,
    "rotary": lambda device, p: rotary(device, False),
    "rotary, interleaved": lambda device, p: rotary(device, True),
    "linear_cross_entropy": lambda device, p: linear_cross_entropy(device, "mean"),
    "linear_cross_entropy, rows": lambda device, p: linear_cross_entropy(device, "none"),
}
