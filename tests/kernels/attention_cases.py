"""What tests of the fused attention kernels share: inputs, rules, and calls on either backend."""

import math

import torch
from torch import Tensor

import fastformer
from fastformer.functional import attention
from fastformer.functional.attention import fused as fused_attention
from fastformer_kernels.attention.arguments import Arguments
from tests.support.fused_op import DEVICE, INTERPRETED, assert_as_accurate_as_reference, poisoned

INF = math.inf
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def heads(B: int, H: int, T: int, S: int, K: int, kv_heads: int | None = None) -> list[Tensor]:
    kv_heads = H if kv_heads is None else kv_heads
    return [torch.randn(B, h, n, K, dtype=torch.float64) for h, n in ((H, T), (kv_heads, S), (kv_heads, S))]


def check(inputs: list[Tensor], dtype: torch.dtype, **rules) -> None:
    mask = rules.pop("mask", None)
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rules.items()}
    if mask is None or mask.dtype == torch.bool:
        held = None if mask is None else mask.to(DEVICE)
        assert_as_accurate_as_reference(lambda q, k, v: attention(q, k, v, held, **moved), inputs, dtype)
    else:
        assert_as_accurate_as_reference(
            lambda q, k, v, m: attention(q, k, v, m, **moved), [*inputs, mask.double()], dtype
        )


B, T, S = 3, 40, 75  # fp32 tiles are 32 to 64 wide: whole tiles, cut tiles and tiles of padding alone all occur


def gaps() -> Tensor:
    mask = torch.rand(B, S) < 0.7
    mask[1] = False
    return mask


def left_padding() -> Tensor:
    return torch.arange(S) >= torch.tensor([[0], [66], [S]])


def additive(*shape: int) -> Tensor:
    mask = torch.randn(*shape)
    mask[..., 0, 1:3] = -INF
    return mask


LENGTHS = torch.tensor([S, 0, 66])
QUERIES = torch.tensor([T, 3, 33])
RULES = {
    "key_lengths": lambda: {"key_lengths": LENGTHS},
    "query_lengths": lambda: {"query_lengths": QUERIES},
    "int32 lengths, causal": lambda: {"key_lengths": LENGTHS.int(), "query_lengths": QUERIES.int(), "causal": True},
    "causal to the last key of each": lambda: {
        "key_lengths": torch.tensor([S, 1, 9]),
        "query_lengths": QUERIES,
        "causal": True,
        "alignment": "bottom_right",
    },
    "left padding, causal": lambda: {"key_mask": left_padding(), "causal": True},
    "gaps": lambda: {"key_mask": gaps()},
    "gaps and lengths": lambda: {"key_mask": gaps(), "key_lengths": LENGTHS},
    "window": lambda: {"window": (9, 3)},
    "causal window": lambda: {"window": (20, None), "causal": True, "alignment": "bottom_right"},
    "window to the right, lengths": lambda: {"window": (None, 2), "key_lengths": LENGTHS},
    "softcap": lambda: {"softcap": 1.5},
    "large softcap": lambda: {"softcap": 50.0},
    "softcap, mask": lambda: {"softcap": 2.0, "mask": additive(T, S)},
    "scale": lambda: {"scale": 0.3},
    "negative scale": lambda: {"scale": -0.3},
    "bool [T, S]": lambda: {"mask": torch.rand(T, S) < 0.6},
    "bool [B, 1, 1, S], as key mask": lambda: {"mask": gaps()[:, None, None]},
    "bool [B, 1, 1, S] and key mask": lambda: {"mask": gaps()[:, None, None], "key_mask": left_padding()},
    "bool [B, 1, T, S], causal": lambda: {"mask": torch.rand(B, 1, T, S) < 0.6, "causal": True},
    "additive [S]": lambda: {"mask": additive(1, S)[0]},
    "additive [T, S]": lambda: {"mask": additive(T, S)},
    "additive [T, 1]": lambda: {"mask": torch.randn(T, 1)},
    "additive [B, H, T, S], causal": lambda: {"mask": additive(B, 2, T, S), "causal": True},
    "additive [H, 1, S], lengths": lambda: {"mask": additive(2, 1, S), "key_lengths": LENGTHS},
    "everything": lambda: {
        "mask": additive(B, 1, T, S),
        "causal": True,
        "alignment": "bottom_right",
        "window": (40, None),
        "query_lengths": QUERIES,
        "key_lengths": torch.tensor([S, 40, 66]),
        "key_mask": gaps(),
        "softcap": 3.0,
        "scale": 0.7,
    },
}


def fused(function, *inputs, **arguments):
    with fastformer.backend("triton"), poisoned():
        return function(*inputs, **arguments)


def plain(function, *inputs, **arguments):
    with fastformer.backend("reference"):
        return function(*inputs, **arguments)


def on_device(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(DEVICE, dtype).requires_grad_() for x in tensors]


def take_the_fast_way(monkeypatch) -> None:
    """Add dQ with atomics also where memory is poisoned, which asks torch for deterministic algorithms."""
    backward = fused_attention._backward
    monkeypatch.setattr(fused_attention, "_backward", lambda *x: backward(*x[:10], True, *x[11:]))


def op_arguments(packed: bool, options: bool) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """Tensors and arguments as the registered ops take them."""
    bounds = torch.tensor([[0, 5, 0, 0, 5, 0, 0, 0], [5, 3, 5, 0, 3, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    if packed:
        q, k, v = (torch.randn(8, 2, 16, device=DEVICE) for _ in range(3))
        return q, k, v, Arguments(queries=5, keys=5, scale=0.25, right=0, bounds=bounds)
    q, k, v = (torch.randn(2, 2, n, 16, device=DEVICE) for n in (5, 7, 7))
    mask = torch.randn(5, 7, device=DEVICE) if options else None
    seed = torch.tensor([3], device=DEVICE) if options else None
    dropout_p = 0.1 if options else 0.0
    arguments = Arguments(queries=5, keys=7, scale=0.25, shift=2, right=0, dropout_p=dropout_p, mask=mask, seed=seed)
    return q, k, v, arguments
