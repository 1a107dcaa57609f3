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


def heads(kv_heads: int = H, size: int = K) -> list[Tensor]:
    return [normal(B, h, T, size) for h in (H, kv_heads, kv_heads)]


def attention(device: str, p: float, inputs: list[Tensor], **rules: object) -> GpuCase:
    """Attention with rules, of q, k, v and an additive mask if there is a fourth input."""
    rules = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in rules.items()}
    return lambda *x: functional.attention(*x, **rules, dropout_p=p), inputs


def attention_distances(device: str, p: float) -> GpuCase:
    return lambda q, k, v, bias, sinks: functional.attention(
        q, k, v, causal=True, dropout_p=p, distance_bias=bias, sinks=sinks
    ), [*heads(kv_heads=H // 4), normal(H, 2 * T + 99), normal(H)]


def attention_with_weights(device: str, p: float) -> GpuCase:
    given = lengths(device)
    return lambda q, k, v: functional.attention_with_weights(q, k, v, key_lengths=given, dropout_p=p), heads()


def packed_attention(device: str, p: float) -> GpuCase:
    layout = Layout.from_lengths([T, 1, T // 3, T - 1], device)
    inputs = [normal(layout.total, H, K) for _ in range(3)]
    return lambda q, k, v: functional.packed_attention(q, k, v, layout, causal=True, dropout_p=p), inputs


def norm(op: Callable[..., Tensor | tuple[Tensor, Tensor]], rows: int, width: int, p: float | None = None) -> GpuCase:
    """A norm, of a sum and after dropout if p is given."""
    sizes = [(rows, width)] * (1 if p is None else 2), [(width,)] * (1 if "rms" in op.__name__ else 2)
    matrices, vectors = ([normal(*shape) for shape in shapes] for shapes in sizes)
    options = {} if p is None else {"dropout_p": p}
    return lambda *x: op(*x[: len(matrices)], width, *x[len(matrices) :], **options), [*matrices, *vectors]


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
    "attention": lambda device, p: attention(device, p, heads(), causal=True, key_lengths=lengths(device)),
    "attention, gaps": lambda device, p: attention(device, p, heads(size=2 * K), key_mask=torch.rand(B, T) < 0.7),
    "attention, grouped": lambda device, p: attention(
        device, p, heads(kv_heads=H // 4), causal=True, window=(T // 4, None), softcap=30.0
    ),
    "attention, additive": lambda device, p: attention(device, p, [*heads(), normal(1, H, T, T)]),
    "attention, by distance": attention_distances,
    "attention_with_weights": attention_with_weights,
    "packed_attention": packed_attention,
    "layer_norm": lambda device, p: norm(functional.layer_norm, MANY, D),
    "layer_norm, wide": lambda device, p: norm(functional.layer_norm, 300, 32 * D),
    "rms_norm": lambda device, p: norm(functional.rms_norm, MANY, D),
    "rms_norm, wide": lambda device, p: norm(functional.rms_norm, 300, 32 * D),
    "dropout_add_layer_norm": lambda device, p: norm(functional.dropout_add_layer_norm, MANY, D, p),
    "dropout_add_rms_norm": lambda device, p: norm(functional.dropout_add_rms_norm, MANY, D, p),
    "feed_forward": lambda device, p: feed_forward("gelu", 1, p),
    "feed_forward, gated": lambda device, p: feed_forward("swiglu", 2, p),
    "embedding": embedding,
    "rotary": lambda device, p: rotary(device, False),
    "rotary, interleaved": lambda device, p: rotary(device, True),
    "linear_cross_entropy": lambda device, p: linear_cross_entropy(device, "mean"),
    "linear_cross_entropy, rows": lambda device, p: linear_cross_entropy(device, "none"),
}
