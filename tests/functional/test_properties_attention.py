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
from tests.functional.attention_forms import naive
from tests.support import fused_op
from tests.support.closeness import assert_same

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


def call(drawn: DrawnCall, rules: dict[str, Any], inputs: tuple[Tensor, ...], op: Any) -> Tensor:
    """Run `attention`, or the loop over queries, on tensors laid out as drawn."""
    q, k, v = (drawn.laid_out(x) for x in inputs[:3])
    rules = {name: x.to(q.device) if isinstance(x, Tensor) else x for name, x in rules.items()}
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
    assert_same(found, call(drawn, rules, tuple(inputs), lambda *x, **more: naive(*x, **more)[0]), inputs)


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
    assert_same(out, pack(other.transpose(1, 2), layouts[0]), [q, k, v])
