"""What tests of the fused attention kernels share: inputs, rules, and calls on either backend."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastformer
from fastformer.functional import attention
from fastformer.functional.attention import fused as fused_attention
from tests.support.closeness import gradients
from tests.support.fused_op import DEVICE, INTERPRETED, assert_as_accurate_as_reference, poisoned

INF = math.inf
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def heads(B: int, H: int, T: int, S: int, K: int, kv_heads: int | None = None, V: int | None = None) -> list[Tensor]:
    """Queries, keys and values in fp64, values of another head size if V is given."""
    kv_heads = H if kv_heads is None else kv_heads
    shapes = (B, H, T, K), (B, kv_heads, S, K), (B, kv_heads, S, K if V is None else V)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def by_distance(H: int, positions: int) -> Tensor:
    return torch.randn(H, 2 * positions - 1, dtype=torch.float64)


def moved(rules: dict) -> dict:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rules.items()}


def check(inputs: list[Tensor], dtype: torch.dtype, names: tuple[str, ...] = (), *, op=attention, **rules) -> None:
    """Compare output and gradients of q, k, v, of what is named, and of an additive mask."""
    rules = moved(rules)
    if "mask" in rules and rules["mask"].is_floating_point():
        names, inputs = (*names, "mask"), [*inputs, rules.pop("mask").double()]
    assert_as_accurate_as_reference(
        lambda *x: op(*x[:3], **dict(zip(names, x[3:], strict=True)), **rules), inputs, dtype
    )


def check_decoding(inputs: list[Tensor], own: dict[str, Tensor] | None = None, **rules) -> None:
    """Compare what a step of decoding gives, in each dtype, with the formula in fp64 of the same inputs."""
    rules = moved(rules)
    for dtype in DTYPES:
        q, k, v = (x.to(DEVICE, dtype) for x in inputs)
        given = {name: x.to(DEVICE, dtype) for name, x in (own or {}).items()}
        with torch.no_grad():
            assert fused_attention.decodes(q, k, v, *given.values())
            actual = fused(attention, q, k, v, **rules, **given)
            wide = {name: x.double() for name, x in given.items()}
            exact = plain(attention, *(x.double() for x in (q, k, v)), **rules, **wide)
        assert actual.dtype == dtype
        assert actual.shape == exact.shape
        assert (actual.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


def check_second_derivative(x: list[Tensor], call) -> None:
    """Compare the gradients of the squares of the gradients of a call's squares."""
    both = []
    for run in (fused, plain):
        with sdpa_kernel(SDPBackend.MATH) if run is plain else nullcontext():  # as documented for the reference
            first = torch.autograd.grad(call(run).square().sum(), x, create_graph=True)
        both.append(torch.autograd.grad(sum(g.square().sum() for g in first), x))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


def check_empty(x: list[Tensor], own: dict[str, Tensor] | None = None, **rules) -> None:
    """No query, key or batch: the output is empty or zero, and so are the gradients."""
    out = fused(attention, *x[:3], **(own or {}), **rules)
    assert out.shape == (*x[0].shape[:3], x[2].shape[3])
    assert not out.any()
    assert not any(g.any() for g in gradients(out, x))


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
    "to the last key of each": lambda: {
        "key_lengths": torch.tensor([S, 1, 9]),
        "query_lengths": QUERIES,
        "alignment": "bottom_right",
    },
    "left padding, causal": lambda: {"key_mask": left_padding(), "causal": True},
    "gaps": lambda: {"key_mask": gaps()},
    "gaps and lengths": lambda: {"key_mask": gaps(), "key_lengths": LENGTHS},
    "window": lambda: {"window": (9, 3)},
    "causal window": lambda: {"window": (20, None), "causal": True, "alignment": "bottom_right"},
    "window to the right, lengths": lambda: {"window": (None, 2), "key_lengths": LENGTHS},
    "window to the right, bottom_right": lambda: {"window": (None, 2), "alignment": "bottom_right"},
    "softcap": lambda: {"softcap": 1.5},
    "large softcap": lambda: {"softcap": 50.0},
    "softcap, mask": lambda: {"softcap": 2.0, "mask": additive(T, S)},
    "negative scale": lambda: {"scale": -0.3},
    "bool [T, S], fully masked rows": lambda: {"mask": (torch.rand(T, S) < 0.6) & (torch.arange(T) % 7 > 0)[:, None]},
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
