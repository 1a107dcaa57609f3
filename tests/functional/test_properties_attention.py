"""Attention over drawn shapes, strides, masks and rules: the reference is the formula, the kernels are the reference.

A failing example that hypothesis finds stays here as an `@example`.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastformer
from fastformer.functional import attention, packed_attention
from fastformer.packing import Layout, pack, unpack
from tests.support import fused_op
from tests.support.closeness import assert_close, gradients

# On a busy machine, drawing takes longer than hypothesis allows.
PROFILE: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
LAYOUTS = ("heads first", "heads second", "strided", "expanded")


@dataclass(frozen=True)
class DrawnCall:
    """One call; tensors are made from the seed."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    width: int
    value_width: int
    layout: str
    mask: str | None
    causal: bool
    alignment: str
    window: tuple[int | None, int | None] | None
    query_lengths: bool
    key_lengths: bool
    key_mask: bool
    softcap: float | None
    seed: int

    def tensors(self) -> tuple[list[Tensor], dict[str, Any]]:
        """q, k, v (and a mask with a gradient), fp64 leaves, and the rules."""
        torch.manual_seed(self.seed)
        B, T, S = self.batch, self.queries, self.keys
        shapes = [(self.kv_heads * self.group, T, self.width), (self.kv_heads, S, self.width)]
        shapes.append((self.kv_heads, S, self.value_width))
        rules: dict[str, Any] = {"causal": self.causal, "alignment": self.alignment, "window": self.window}
        rules["softcap"] = self.softcap
        for name, drawn, longest in (("query_lengths", self.query_lengths, T), ("key_lengths", self.key_lengths, S)):
            if drawn:
                rules[name] = torch.randint(0, longest + 1, (B,))
        if self.key_mask:
            rules["key_mask"] = torch.rand(B, S) < 0.7
        inputs = [torch.randn(B, *shape, dtype=torch.float64) for shape in shapes]
        if self.mask == "bool":
            rules["mask"] = torch.rand(B, 1, T, S) < 0.8
        elif self.mask == "additive":
            inputs.append(torch.randn(1, self.kv_heads * self.group, T, S, dtype=torch.float64))
        return [x.requires_grad_() for x in inputs], rules

    def laid_out(self, x: Tensor) -> Tensor:
        """The same values in memory of another order."""
        if self.layout == "heads second":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "strided":
            return torch.stack([x, x * 0 + 9], -1)[..., 0]
        if self.layout == "expanded":
            return x[:1].expand_as(x)
        return x


@st.composite
def calls(draw: st.DrawFn, largest: int = 7) -> DrawnCall:
    side = st.none() | st.integers(0, 4)
    return DrawnCall(
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        queries=draw(st.integers(1, largest)),
        keys=draw(st.integers(1, largest)),
        width=draw(st.integers(1, 5)),
        value_width=draw(st.integers(1, 5)),
        layout=draw(st.sampled_from(LAYOUTS)),
        mask=draw(st.sampled_from([None, "bool", "additive"])),
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        window=draw(st.none() | st.tuples(side, side)),
        query_lengths=draw(st.booleans()),
        key_lengths=draw(st.booleans()),
        key_mask=draw(st.booleans()),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        seed=draw(st.integers(0, 1000)),
    )


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **rules: Any) -> Tensor:
    """The docstring of `functional.attention`, one query at a time."""
    B, H, T, S = *q.shape[:3], k.shape[2]
    group = H // k.shape[1]
    queries = rules.get("query_lengths", torch.full((B,), T)).tolist()
    keys = rules.get("key_lengths", torch.full((B,), S)).tolist()
    rows = []
    for b in range(B):
        shift = keys[b] - queries[b] if rules["alignment"] == "bottom_right" else 0
        for h in range(H):
            for t in range(T):
                allowed = []
                for s in range(keys[b]):
                    seen = rules.get("mask") is None or bool(rules["mask"].expand(B, H, T, S)[b, h, t, s])
                    seen &= rules.get("key_mask") is None or bool(rules["key_mask"][b, s])
                    seen &= not rules["causal"] or s <= t + shift
                    left, right = rules["window"] or (None, None)
                    seen &= left is None or s >= t + shift - left
                    seen &= right is None or s <= t + shift + right
                    if seen:
                        allowed.append(s)
                if t >= queries[b] or not allowed:
                    rows.append(0 * v[b, h // group, 0])
                    continue
                scores = k[b, h // group, allowed] @ q[b, h, t] * q.shape[-1] ** -0.5
                if rules["softcap"] is not None:
                    scores = rules["softcap"] * torch.tanh(scores / rules["softcap"])
                if bias is not None:
                    scores = scores + bias.expand(B, H, T, S)[b, h, t, allowed]
                rows.append(scores.softmax(0) @ v[b, h // group, allowed])
    return torch.stack(rows).view(B, H, T, -1)


def call(drawn: DrawnCall, rules: dict[str, Any], inputs: tuple[Tensor, ...], op: Any) -> Tensor:
    """Run `attention`, or the formula, on tensors laid out as drawn."""
    q, k, v = (drawn.laid_out(x) for x in inputs[:3])
    rules = {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in rules.items()}
    if op is formula:
        return formula(q, k, v, *inputs[3:], **rules)
    mask = inputs[3] if len(inputs) == 4 else rules.pop("mask", None)
    out: Tensor = op(q, k, v, mask, **rules)
    return out


@pytest.mark.slow
@settings(max_examples=60, **PROFILE)
@given(calls())
def test_the_reference_is_the_formula(drawn: DrawnCall) -> None:
    inputs, rules = drawn.tensors()
    with fastformer.backend("reference"):
        found = call(drawn, rules, tuple(inputs), attention)
    expected = call(drawn, rules, tuple(inputs), formula)
    assert_close(found, expected)
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_close(a, b)


@pytest.mark.slow
@fused_op.needs_kernels
@settings(max_examples=8, **PROFILE)
@given(calls())
def test_the_kernels_are_the_reference(drawn: DrawnCall) -> None:
    drawn = replace(drawn, value_width=drawn.width)  # what the kernels take
    inputs, rules = drawn.tensors()
    fused_op.assert_as_accurate_as_reference(
        lambda *given: call(drawn, dict(rules), given, attention), inputs, torch.float32
    )


@settings(max_examples=40, **PROFILE)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    alignment=st.sampled_from(["top_left", "bottom_right"]),
    window=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_packed_is_padded(lengths: Any, heads: int, causal: bool, alignment: Any, window: Any) -> None:
    query_lengths, key_lengths = (torch.tensor(side) for side in zip(*lengths, strict=True))
    layouts = Layout.from_lengths(query_lengths), Layout.from_lengths(key_lengths)
    q, k, v = (
        torch.randn(layout.total, heads, 3, dtype=torch.float64, requires_grad=True)
        for layout in (layouts[0], layouts[1], layouts[1])
    )
    rules = {"causal": causal, "alignment": alignment, "window": window}
    out = packed_attention(q, k, v, *layouts, **rules)
    padded = [
        unpack(x, layout).transpose(1, 2) for x, layout in zip((q, k, v), (layouts[0], *layouts[1:] * 2), strict=True)
    ]
    other = attention(*padded, query_lengths=query_lengths, key_lengths=key_lengths, **rules)
    expected = pack(other.transpose(1, 2), layouts[0])
    assert_close(out, expected)
    for a, b in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        assert_close(a, b)
