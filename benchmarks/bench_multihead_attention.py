"""nn.MultiheadAttention against fastformer's of the same parameters, with padding and causality, on a GPU.

Called in the same way: a bool mask `[L, L]`, True = may not attend, and a bool mask `[B, L]`, True = padding; "default"
returns the weights too. "packed" is `MultiheadAttention.packed` with packing and unpacking, against `nn.
MultiheadAttention` with `need_weights=False`.
Outputs and gradients are compared with those of torch.nn in fp64.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer
from benchmarks.competitors.known import require
from benchmarks.competitors.ops import FP32_TOLERANCE, fp64_results
from benchmarks.harness.attention_case import AttentionShape, attention_case, case_name
from benchmarks.harness.race import DIRECTIONS, Direction, Op, Race
from fastformer.packing import pack, unpack

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2  # bf16, through three products
SHAPES = {
    "quick-16x12x1024": AttentionShape(16, 12, 1024, kind="uniform"),
    "full-128x8x36": AttentionShape(128, 8, 36, kind="multi30k", share=0.55),
    "quick-cpu": AttentionShape(8, 4, 128, kind="uniform"),
}
GOALS = {"default": 3.0, "need_weights=False": 2.0, "packed": 2.0}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("shape", "call"),
    [*product(list(SHAPES)[:2], GOALS), pytest.param("quick-cpu", "packed", marks=pytest.mark.cpu)],
)
@pytest.mark.parametrize("competitor", ["torch.nn"])
def bench_multihead_attention(race: Race, shape: str, competitor: str, call: str, direction: Direction) -> None:
    require(competitor, race.device)
    if race.tiny and (direction != "both" or shape.startswith("full")):
        pytest.skip("another case proves it")
    p = attention_case(race, SHAPES[shape])
    width = p.heads * p.head_size
    settings: dict[str, Any] = {"batch_first": True, "device": race.device, "dtype": p.dtype}
    other = nn.MultiheadAttention(width, p.heads, **settings)
    module = fastformer.MultiheadAttention(width, p.heads, **settings)
    module.in_proj_weight, module.in_proj_bias, module.out_proj = (
        other.in_proj_weight,
        other.in_proj_bias,
        other.out_proj,
    )
    nn.init.normal_(other.in_proj_bias)
    nn.init.normal_(other.out_proj.bias)
    x = torch.randn(p.batch, p.length, width, device=race.device).to(p.dtype).requires_grad_()
    inputs = [x, *other.parameters()]
    upstream = torch.randn_like(x) * p.real[..., None]

    masks: dict[str, Any] = {"key_padding_mask": ~p.real, "attn_mask": p.look_ahead, "need_weights": call == "default"}

    def fused() -> Tensor:
        with fastformer.backend(race.backend):
            if call == "packed":
                return unpack(module.packed(pack(x, p.layout), p.layout, causal=True), p.layout)
            return module(x, x, x, **masks)[0]

    def formula(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(other.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(other, named, (x, x, x), {**masks, "need_weights": False})[0]

    race.op(
        f"{case_name('nn.MultiheadAttention', SHAPES[shape], p)}, {call}",
        Op("fastformer", fused, inputs),
        Op(competitor, lambda: other(x, x, x, **masks)[0], inputs),
        upstream=upstream,
        expected=fp64_results(formula, inputs, upstream),
        tolerance=TOLERANCE if race.dtype == torch.bfloat16 else FP32_TOLERANCE,
        direction=direction,
        goal=None if direction == "backward" or race.dtype == torch.float32 else GOALS[call],
    )
