"""Hostile arguments for the ops and layouts, each with its formula in plain fp64: a result equal to it, or an error."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer import functional
from fastformer.packing import Layout

DTYPES = (torch.float64,) * 4 + (torch.float32,) + (torch.bfloat16,) * 2 + (torch.float16,) * 2
ODD_DTYPES = (torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
INTEGERS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64)
Arguments = dict[str, Any]


class Own(Tensor):
    """A subclass of somebody's own."""


@dataclass
class Call:
    """An op, its arguments, and the formula of its results in fp64 (of the same names)."""

    op: Callable[..., Any]
    arguments: Arguments
    formula: Callable[..., Any]


def numbers(random: Random, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, with strides of every kind."""
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    match random.randrange(9):
        case 0 if x.dim() > 1:
            return x.mT.contiguous().mT
        case 1:
            return torch.stack([x, x + 1], -1)[..., 0]
        case 2 if x.dim() and x.shape[0]:
            return x[:1].expand_as(x)
        case 3 if x.dim() and x.numel():  # far apart
            wide = torch.zeros(*shape[:-1], shape[-1] * 1000, dtype=dtype)
            wide[..., ::1000] = x
            return wide[..., ::1000]
        case 4:
            return x.as_subclass(nn.Parameter) if random.random() < 0.5 else x.as_subclass(Own)
        case _:
            return x


def spoilt(random: Random, arguments: Arguments) -> None:
    """Make one argument wrong: of another type, dtype, shape, device."""
    name = random.choice(list(arguments))
    x = arguments[name]
    if isinstance(x, Tensor):
        wrong: list[Any] = [
            *(x.detach().tolist(), None, 3, "x", x[None], x.flatten(), x.detach().to("meta")),
            *(
                torch.cat([x, x]) if x.dim() else x,
                x.detach().to(random.choice(ODD_DTYPES)),
                x[..., :0] if x.dim() else x,
            ),
        ]
        arguments[name] = x.detach().float().numpy() if random.random() < 0.1 else random.choice(wrong)
    else:
        arguments[name] = random.choice((None, -1, 0, 1.5, math.nan, math.inf, "x", True, (1, 2), (-1, 0), [1], 10**18))


def lengths(random: Random, batch: int, longest: int) -> Any:
    """Lengths as a tensor of some integer dtype; now and then a list, an array, or beyond."""
    drawn = [random.randint(0, longest) for _ in range(batch)]
    if batch and random.random() < 0.08:
        drawn[0] = random.choice((-1, longest + 1))
    if random.random() < 0.1:
        return random.choice((drawn, np.array(drawn, dtype=np.int64), tuple(drawn)))
    dtype = random.choice(INTEGERS)
    return torch.tensor(drawn, dtype=torch.int64).to(dtype)


def distances(random: Random, heads: int, longest: int, dtype: torch.dtype) -> Tensor:
    """A bias by distance; now and then of too few positions."""
    positions = longest + random.choice((0, 0, 1, 3, -1 if random.random() < 0.3 else 0))
    bias = torch.randn(heads, max(2 * positions - 1, 0)).to(random.choice((dtype, torch.float32)))
    return bias.masked_fill(torch.rand(bias.shape) < random.choice((0.0, 0.3)), -math.inf)


def attention(random: Random) -> Call:
    """An attention with any combination of rules."""
    dtype = random.choice(DTYPES)
    B, H, T, S, K = random.choice((0, 1, 2, 3)), random.choice((1, 2)), *random.choices((0, 1, 2, 5), k=2), 4
    heads = H * random.choice((1, 1, 2))
    given: Arguments = {
        "q": numbers(random, B, heads, T, K, dtype=dtype),
        "k": numbers(random, B, H, S, K, dtype=dtype),
        "v": numbers(random, B, H, S, random.choice((K, 3)), dtype=dtype),
    }
    if random.random() < 0.6:
        shape = random.choice(((T, S), (S,), (1, S), (T, 1), (B, 1, T, S), (B, heads, T, S), (B, 1, 1, S)))
        hidden = torch.rand(shape) < random.choice((0.3, 0.9, 1.0, 1.0))
        low = random.choice((-math.inf, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min, -6e4))
        # What is a number in fp32 and -inf in the dtype that is computed in decides whether a row sees anything.
        float_ = torch.randn(shape).masked_fill(hidden, low).to(random.choice((dtype, torch.float32, torch.float32)))
        given["mask"] = float_ if random.random() < 0.6 else ~hidden
    options: dict[str, Callable[[], Any]] = {
        "key_mask": lambda: torch.rand(B, S) < 0.6,
        "key_lengths": lambda: lengths(random, B, S),
        "query_lengths": lambda: lengths(random, B, T),
        "causal": lambda: True,
        "alignment": lambda: "bottom_right",
        "window": lambda: (random.choice((None, 0, 1, 9)), random.choice((None, 0, 2))),
        "softcap": lambda: random.choice((0.5, 30.0)),
        "scale": lambda: random.choice((0.1, 1.0, 0.0)),
        "dropout_p": lambda: random.choice((0.0, 1.0)),
        "distance_bias": lambda: distances(random, heads, max(T, S, 1), dtype),
        "sinks": lambda: numbers(random, heads, dtype=random.choice((dtype, torch.float32))),
    }
    given |= {name: make() for name, make in options.items() if random.random() < 0.25}
    op = functional.attention_with_weights if random.random() < 0.4 else functional.attention
    return Call(op, given, lambda **x: exact_attention(dtype, op is functional.attention_with_weights, **x))


def exact_attention(dtype: torch.dtype, wants_weights: bool, q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> Any:
    """By the formula; an additive mask has the values that it has in the dtype that is computed in."""
    B, H, T, K = q.shape
    S = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) * (K**-0.5 if rules.get("scale") is None else rules["scale"])
    if rules.get("softcap") is not None:
        scores = rules["softcap"] * (scores / rules["softcap"]).tanh()
    ends = {name: rules.get(f"{name}_lengths") for name in ("query", "key")}
    t, s = torch.arange(T)[:, None], torch.arange(S)
    length = {"query": torch.tensor(T).view(1, 1, 1, 1), "key": torch.tensor(S).view(1, 1, 1, 1)}
    length |= {name: x.to(torch.int64).view(B, 1, 1, 1) for name, x in ends.items() if x is not None}
    assert all(((x >= 0) & (x <= most)).all() for x, most in ((length["query"], T), (length["key"], S)))
    shift = length["key"] - length["query"] if rules.get("alignment") == "bottom_right" else 0
    if rules.get("distance_bias") is not None:
        bias = rules["distance_bias"]
        at = (bias.shape[1] - 1) // 2 + s - (t + shift)  # beyond it is padding
        assert bias.shape[1] >= 2 * max(T, S) - 1
        by_row = bias[:, at.clamp(0, bias.shape[1] - 1).reshape(-1, T, S)]  # [H, B or 1, T, S]
        scores = scores + by_row.transpose(0, 1).double()
    left, right = rules.get("window") or (None, None)
    open_ = torch.ones(B, 1, T, S, dtype=torch.bool) & (s < length["key"]) & (t < length["query"])
    if rules.get("causal"):
        right = 0 if right is None else min(right, 0)
    if right is not None:
        open_ = open_ & (s <= t + shift + right)
    if left is not None:
        open_ = open_ & (s >= t + shift - left)
    if rules.get("key_mask") is not None:
        open_ = open_ & rules["key_mask"][:, None, None]
    mask = rules.get("mask")
    if mask is not None:
        if mask.dtype == torch.bool:
            open_ = open_ & mask
        else:
            fits = torch.promote_types(mask.dtype, dtype) == dtype
            scores = scores + (mask if fits else mask.to(dtype)).double()
    scores = scores.masked_fill(~open_, -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.0)
    if rules.get("sinks") is not None:
        sinks = rules["sinks"].double()[:, None, None].expand(B, H, T, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].masked_fill(dead, 0.0)
    else:
        weights = scores.softmax(-1).masked_fill(dead, 0.0)
    weights = weights * (rules.get("dropout_p", 0.0) != 1.0)
    return (weights @ v, weights) if wants_weights else weights @ v


def packed_attention(random: Random) -> Call:
    """Attention within packed sequences, against the padded formula of each."""
    dtype = random.choice(DTYPES)
    sizes = [random.randint(0, 4) for _ in range(random.randint(0, 3))]
    layout = Layout.from_lengths(sizes)
    rows = layout.total if random.random() < 0.95 else layout.total + 1
    q, k, v = (numbers(random, rows, 2, 4, dtype=dtype) for _ in range(3))
    given: Arguments = {"q": q, "k": k, "v": v, "layout": layout}
    options = {"causal": True, "window": (1, 1), "softcap": 2.0, "scale": 0.3}
    given |= {name: value for name, value in options.items() if random.random() < 0.3}

    def formula(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **rules: Any) -> Tensor:
        parts = [
            exact_attention(dtype, False, *(x[None].transpose(1, 2) for x in three), **rules)
            for three in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts]) if parts else v

    return Call(functional.packed_attention, given, formula)


def norm(random: Random) -> Call:
    """layer_norm, rms_norm, or the step between sublayers that ends in one of them."""
    dtype = random.choice(DTYPES)
    D = random.choice((1, 3, 8))
    shape = random.choice(((D,), (2, D), (0, D), (2, 3, D)))
    x = numbers(random, *shape, dtype=dtype)
    weight = numbers(random, D, dtype=dtype) if random.random() < 0.6 else None
    bias = numbers(random, D, dtype=dtype) if random.random() < 0.6 else None
    eps = random.choice((1e-5, 0.1, 1e-3))
    centred, adds = random.random() < 0.5, random.random() < 0.4
    given = {"x": x, "normalized_shape": D, "weight": weight, "eps": eps} | ({"bias": bias} if centred else {})
    plain = F.layer_norm if centred else F.rms_norm
    if not adds:
        op = functional.layer_norm if centred else functional.rms_norm
        return Call(op, given, lambda x, normalized_shape, **more: plain(x, (D,), **more))
    given |= {"residual": numbers(random, *shape, dtype=dtype), "dropout_p": random.choice((0.0, 0.0, 1.0))}

    def formula(x: Tensor, residual: Tensor, normalized_shape: int, dropout_p: float, **more: Any) -> Any:
        total = residual + x * (dropout_p != 1.0)
        return plain(total, (D,), **more), total

    return Call(functional.dropout_add_layer_norm if centred else functional.dropout_add_rms_norm, given, formula)


def feed_forward(random: Random) -> Call:
    """With every activation, and computed again or not."""
    dtype = random.choice(DTYPES)
    D, width, out = (random.choice((1, 3, 8)) for _ in range(3))
    activation = random.choice(("relu", "gelu", "gelu_tanh", "geglu", "swiglu", "reglu"))
    gated = activation in ("geglu", "swiglu", "reglu")
    rows = width * 2 if gated else width
    given = {
        "x": numbers(random, *random.choice(((D,), (2, D), (0, D), (2, 3, D))), dtype=dtype),
        "weight1": numbers(random, rows, D, dtype=dtype),
        "bias1": numbers(random, rows, dtype=dtype) if random.random() < 0.6 else None,
        "weight2": numbers(random, out, width, dtype=dtype),
        "bias2": numbers(random, out, dtype=dtype) if random.random() < 0.6 else None,
        "activation": activation,
        "dropout_p": random.choice((0.0, 0.0, 1.0)),
        "recompute": random.random() < 0.3,
    }

    def formula(x, weight1, bias1, weight2, bias2, activation, dropout_p, recompute) -> Tensor:
        functions = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
        of_gate = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}
        hidden = F.linear(x, weight1, bias1)
        if gated:
            gate, value = hidden.chunk(2, -1)
            hidden = of_gate[activation](gate) * value
        else:
            hidden = functions[activation](hidden)
        return F.linear(hidden * (dropout_p != 1.0), weight2, bias2)

    return Call(functional.feed_forward, given, formula)


def embedding(random: Random) -> Call:
    """Ids and positions, in bounds or not."""
    dtype = random.choice(DTYPES)
    V, P, D = random.choice((1, 5)), 4, random.choice((1, 8))
    shape = random.choice(((3,), (2, 3), (0,), ()))
    given: Arguments = {"ids": torch.randint(0, V, shape), "weight": numbers(random, V, D, dtype=dtype)}
    if random.random() < 0.1:
        given["ids"] = given["ids"] + random.choice((-V - 1, V))
    if random.random() < 0.6:
        given |= {"table": numbers(random, P, D, dtype=dtype), "positions": torch.randint(0, P, shape)}
    given["scale"] = random.choice((1.0, 0.5))

    def formula(ids, weight, scale, table=None, positions=None) -> Tensor:
        return F.embedding(ids, weight) * scale + (0 if table is None else F.embedding(positions, table))

    return Call(functional.embedding, given, formula)


def rotary(random: Random) -> Call:
    """Part of a head or all of it, positions of every shape that fits, in bounds or not."""
    dtype = random.choice(DTYPES)
    P, K = random.choice((1, 9)), random.choice((2, 5, 8))
    tokens = random.choice(((4,), (2, 3), (0,), (), (2, 1, 3)))
    R = 2 * random.randint(0, K // 2)
    positions = torch.randint(0, P, [n if random.random() < 0.7 else 1 for n in tokens][random.randrange(2) :])
    if random.random() < 0.1:
        positions = positions + random.choice((-P - 1, P))
    tables = torch.randn(2, P, R // 2, dtype=random.choice((torch.float32, torch.float64)))
    given: Arguments = {
        "x": numbers(random, *tokens, random.choice((1, 3)), K, dtype=dtype),
        "positions": positions,
        "tables": tuple(tables),  # constants, without gradients
        "interleaved": random.random() < 0.5,
    }

    def formula(x, positions, tables, interleaved) -> Tensor:
        cos, sin = (F.embedding(positions, table.double())[..., None, :] for table in tables)
        first, second = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
        a, b, out = x[..., first], x[..., second], x.clone()
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def op(x, positions, tables, interleaved) -> Tensor:
        return functional.rotary(x, positions, *tables, interleaved=interleaved)

    return Call(op, given, formula)


def linear_cross_entropy(random: Random) -> Call:
    """With targets that count for nothing, or are none."""
    dtype = random.choice(DTYPES)
    V, D = random.choice((1, 2, 7)), random.choice((1, 8))
    shape = random.choice(((4,), (2, 3), (0,)))
    target = torch.randint(0, V, shape)
    if random.random() < 0.4 and target.numel():
        target.view(-1)[0] = random.choice((-100, -100, V, -1))
    given = {
        "x": numbers(random, *shape, D, dtype=dtype),
        "weight": numbers(random, V, D, dtype=dtype),
        "target": target,
        "bias": numbers(random, V, dtype=dtype) if random.random() < 0.5 else None,
        "label_smoothing": random.choice((0.0, 0.1, 1.0)),
        "reduction": random.choice(("mean", "sum", "none")),
    }

    def formula(x, weight, target, bias, **options) -> Tensor:
        loss = F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), target.flatten(), **options)
        return loss.view(target.shape) if options["reduction"] == "none" else loss

    return Call(functional.linear_cross_entropy, given, formula)


OPS = (attention, attention, attention, packed_attention, norm, feed_forward, embedding, rotary, linear_cross_entropy)
