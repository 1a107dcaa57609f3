"""Inputs and masks for a model, as hostile as torch's doors let them be: every dtype, stride, hint and wrong shape.

Everything is drawn from a seed, in fp64 on the way, so that the same numbers can be made in another dtype.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.fuzz_models import Plan

_LOW = (-math.inf, -math.inf, -math.inf, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e30)
_WRONG = (torch.int64, torch.uint8, torch.int8)


@dataclass
class Given:
    """The arguments of one call.

    Attributes:
        inputs: activations, leaves.
        masks: by their names; None where not given.
        hints: the other keywords.
        contradicted: whether a hint says what its mask does not, so that torch promises nothing.
    """

    inputs: tuple[Tensor, ...]
    masks: dict[str, Tensor | None]
    hints: dict[str, Any]
    contradicted: bool = False


def _strided(x: Tensor, random: Random) -> Tensor:
    """The same values with other strides."""
    match random.randrange(8):
        case 0 if x.dim() > 1:
            return x.mT.contiguous().mT
        case 1 if x.dim() > 0 and x.shape[0]:
            return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
        case 2 if x.dim() > 1 and x.shape[0] > 1:
            return x[:1].expand_as(x)  # other values, in one place
        case 3 if x.dim() == 2 and min(x.shape) > 1:  # rows that overlap: Toeplitz
            return x.flatten()[: sum(x.shape) - 1].clone().as_strided(x.shape, (1, 1))
        case _:
            return x


def attention_mask(random: Random, queries: int, keys: int, batch: int, plan: Plan) -> tuple[Tensor | None, str]:
    """An attn_mask, and what it is: "", "causal", "nearly" causal or "other"."""
    kind = random.choice(("none", "none", "causal", "causal", "random", "dead rows", "all", "3-D", "additive", "wrong"))
    if kind == "none":
        return None, ""
    ahead = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    shape = (batch * plan.heads, queries, keys) if kind == "3-D" else (queries, keys)
    hidden = ahead
    if kind in ("random", "3-D", "additive", "dead rows"):
        hidden = torch.rand(shape) < 0.4
        if kind != "dead rows" and keys:
            hidden[..., 0] = False
        elif kind == "dead rows" and queries:
            hidden[..., random.randrange(queries), :] = True
    if kind == "all":
        hidden = torch.ones(shape, dtype=torch.bool)
    if kind == "wrong":
        return _wrong(random, hidden), "other"
    mask = _additive(random, hidden, plan, mixed=kind == "additive") if random.random() < 0.6 else hidden
    if kind != "causal":
        return _strided(mask, random), "other"
    # -1e9 is not what the hint says: a query that sees nothing else attends to it.
    return mask, "causal" if mask.dtype == torch.bool or bool(mask[ahead].isinf().all()) else "nearly"


def _additive(random: Random, hidden: Tensor, plan: Plan, mixed: bool) -> Tensor:
    """A mask of scores; now and then of another dtype, or one that learns."""
    low = random.choice(_LOW)
    dtype = plan.dtype if random.random() < 0.75 else random.choice((torch.float32, torch.float64, torch.bfloat16))
    values = torch.full(hidden.shape, low, dtype=torch.float64)
    if mixed:
        values = torch.where(torch.rand(hidden.shape) < 0.5, values, -1e9)
    open_ = torch.randn(hidden.shape, dtype=torch.float64) if mixed else torch.zeros(hidden.shape, dtype=torch.float64)
    return torch.where(hidden, values, open_).to(dtype)


def padding_mask(random: Random, batch: int | None, length: int, plan: Plan) -> Tensor | None:
    """A key padding mask, on the left, on the right, with gaps, of everything."""
    kind = random.choice(("none", "none", "none", "right", "right", "left", "gaps", "all", "row", "nothing", "wrong"))
    if kind == "none":
        return None
    rows = 1 if batch is None else batch
    lengths = torch.tensor(
        [random.randint(0 if random.random() < 0.2 else min(1, length), length) for _ in range(rows)]
    )
    hidden = torch.arange(length) >= lengths.view(rows, 1)
    if kind == "left":
        hidden = hidden.flip(1)
    if kind == "gaps":
        hidden = torch.rand(rows, length) < 0.4
    if kind in ("all", "nothing"):
        hidden = torch.full((rows, length), kind == "all")
    if kind == "row" and rows:
        hidden[random.randrange(rows)] = True
    hidden = hidden[0] if batch is None else hidden
    if kind == "wrong":
        return _wrong(random, hidden)
    return _strided(
        _additive(random, hidden, plan, mixed=random.random() < 0.1) if random.random() < 0.4 else hidden, random
    )


def _wrong(random: Random, mask: Tensor) -> Tensor:
    match random.randrange(4):
        case 0:
            return mask.to(random.choice(_WRONG))
        case 1:
            return torch.cat([mask, mask], -1)
        case 2:
            return mask[None]
        case _:
            return mask.flatten()


def given(random: Random, plan: Plan) -> Given:
    """Draw the arguments of a call of a plan's model."""
    torch.manual_seed(plan.seed + 1)
    widths = {plan.d_model, plan.width}
    lengths = [x for x in (0, 1, 2, 3, 4, 5, 5, 6) if x not in widths] or [2]
    batch = random.choice((None, *[x for x in (0, 1, 1, 2, 3, 4) if x not in widths]))
    S, T = random.choice(lengths), random.choice(lengths)
    if random.random() < 0.2:  # so that another order of dimensions still fits
        T = S = batch or S

    def x(length: int, width: int = plan.d_model) -> Tensor:
        first, second = (batch, length) if plan.batch_first else (length, batch)
        made = torch.randn((length, width) if batch is None else (first, second, width), dtype=torch.float64)  # type: ignore[arg-type]
        return made.to(plan.dtype)

    B = 1 if batch is None else batch
    kind = plan.kind
    if kind == "Sequential":
        return Given((x(S),), {}, {})
    if kind == "MultiheadAttention":
        inputs = x(T), x(S, plan.attention.get("kdim", plan.d_model)), x(S, plan.attention.get("vdim", plan.d_model))
        if inputs[0].shape == inputs[1].shape == inputs[2].shape and random.random() < 0.4:
            inputs = (inputs[0],) * 3
        mask, what = attention_mask(random, T, S, B, plan)
        hints = {"need_weights": random.random() < 0.5, "average_attn_weights": random.random() < 0.5}
        made = Given(inputs, {"attn_mask": mask, "key_padding_mask": padding_mask(random, batch, S, plan)}, hints)
        _hint(random, made, "is_causal", mask, what, default=False)
        # torch's hint hides the keys that these add, its mask does not.
        extra = plan.attention["add_bias_kv"] or plan.attention["add_zero_attn"]
        made.contradicted |= bool(made.hints.get("is_causal") and extra)
        return made
    if "Encoder" in kind:
        name = "src_mask" if kind == "EncoderLayer" else "mask"
        mask, what = attention_mask(random, S, S, B, plan)
        made = Given((x(S),), {name: mask, "src_key_padding_mask": padding_mask(random, batch, S, plan)}, {})
        _hint(random, made, "is_causal", mask, what, default=False if kind == "EncoderLayer" else None)
        return made
    tgt_mask, what = attention_mask(random, T, T, B, plan)
    memory_mask, of_memory = attention_mask(random, T, S, B, plan) if random.random() < 0.4 else (None, "")
    masks: dict[str, Tensor | None] = {"tgt_mask": tgt_mask, "memory_mask": memory_mask}
    masks["tgt_key_padding_mask"] = padding_mask(random, batch, T, plan)
    masks["memory_key_padding_mask"] = padding_mask(random, batch, S, plan)
    made = Given((x(T), x(S)), masks, {})
    default = False if kind == "DecoderLayer" else None
    _hint(random, made, "tgt_is_causal", tgt_mask, what, default)
    if random.random() < 0.3:
        _hint(random, made, "memory_is_causal", memory_mask, of_memory, False)
    if kind == "Transformer":
        made.inputs = (x(S), x(T))
        masks["src_mask"], what = attention_mask(random, S, S, B, plan)
        shared = random.random() < 0.7
        masks["src_key_padding_mask"] = (
            masks["memory_key_padding_mask"] if shared else padding_mask(random, batch, S, plan)
        )
        _hint(random, made, "src_is_causal", masks["src_mask"], what, None)
    if random.random() < 0.15 and made.inputs[0].shape == made.inputs[1].shape:
        made.inputs = (made.inputs[0],) * 2
    return made


def _hint(random: Random, made: Given, name: str, mask: Tensor | None, what: str, default: bool | None) -> None:
    """State, or do not state, that a mask is causal; seldom where it is not."""
    drawn = random.random()
    hint = default
    if what == "causal":
        hint = default if drawn < 0.5 else drawn < 0.9
    elif drawn < (0.2 if what == "nearly" else 0.06):
        hint = True
        made.contradicted |= mask is not None
    if hint is not default or drawn < 0.7:
        made.hints[name] = hint
