"""One small call of every fused op, for the tests of what holds for all of them. A new op is a new line.

For n tokens, `shapes(n)` are those of the floating-point inputs, and `extra(n, device)` is what else the op takes:
`call(extra, p, *inputs)` runs it, on whatever device they are, with dropout p where the op has dropout.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastformer import functional
from fastformer.packing import Layout

D, F, V = 16, 32, 48
Output = Tensor | tuple[Tensor, ...]


class Call(NamedTuple):
    shapes: Callable[[int], list[tuple[int, ...]]]
    call: Callable[..., Output]
    extra: Callable[[int, str], object] = lambda n, device: None
    dropout: bool = True
    # How often each of its kernels may be compiled, at most, however many numbers of tokens there are.
    compilations: int = 1


BY_LENGTH = 2  # tiles for short and for long sequences


def ids(n: int, device: str) -> Tensor:
    return torch.arange(n, device=device) % V


def turned(n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions that are not sorted, and tables for a part of each head."""
    angles = torch.arange(V, device=device)[:, None] / (1.0 + torch.arange(D // 2 - 2, device=device))
    return 7 * ids(n, device) % V, angles.cos(), angles.sin()


CALLS = {
    "attention": Call(
        lambda n: [(1, 2, n, D)] * 3,
        lambda _, p, q, k, v: functional.attention(q, k, v, causal=True, dropout_p=p),
        compilations=BY_LENGTH,
    ),
    "attention_with_weights": Call(
        lambda n: [*[(1, 2, n, D)] * 3, (2, 2 * n - 1), (2,)],
        lambda _, p, q, k, v, bias, sinks: functional.attention_with_weights(
            q, k, v, dropout_p=p, distance_bias=bias, sinks=sinks
        ),
        compilations=BY_LENGTH,
    ),
    "packed_attention": Call(
        lambda n: [(n, 2, D)] * 3,
        lambda layout, p, q, k, v: functional.packed_attention(q, k, v, layout, dropout_p=p),
        lambda n, device: Layout.from_lengths([n - n // 3, n // 3], device),
        compilations=BY_LENGTH,
    ),
    "layer_norm": Call(
        lambda n: [(n, D), (D,), (D,)], lambda _, p, x, w, b: functional.layer_norm(x, D, w, b), dropout=False
    ),
    "rms_norm": Call(lambda n: [(n, D), (D,)], lambda _, p, x, w: functional.rms_norm(x, D, w), dropout=False),
    "dropout_add_layer_norm": Call(
        lambda n: [(n, D), (n, D), (D,), (D,)],
        lambda _, p, x, y, w, b: functional.dropout_add_layer_norm(x, y, D, w, b, dropout_p=p),
    ),
    "dropout_add_rms_norm": Call(
        lambda n: [(n, D), (n, D), (D,)],
        lambda _, p, x, y, w: functional.dropout_add_rms_norm(x, y, D, w, dropout_p=p),
    ),
    "feed_forward": Call(
        lambda n: [(n, D), (F, D), (F,), (D, F), (D,)],
        lambda _, p, *inputs: functional.feed_forward(*inputs, activation="gelu", dropout_p=p),
    ),
    "embedding": Call(
        lambda n: [(V, D), (V, D)],
        lambda i, p, weight, table: functional.embedding(i, weight, table, i, scale=2.0, dropout_p=p),
        ids,
    ),
    "rotary": Call(
        lambda n: [(n, 4, D)],
        lambda tables, _, x: functional.rotary(x, *tables),
        turned,
        dropout=False,
    ),
    "linear_cross_entropy": Call(
        lambda n: [(n, D), (V, D), (V,)],
        lambda target, p, x, w, b: functional.linear_cross_entropy(x, w, target, b, label_smoothing=0.1),
        ids,
        dropout=False,
    ),
}


def tensors(output: Output) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def leaves(op: str, n: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in CALLS[op].shapes(n)]
