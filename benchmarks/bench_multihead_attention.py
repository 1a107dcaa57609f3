"""nn.MultiheadAttention against fastformer's of the same parameters, with padding and causality, on a GPU.

Called in the same way: a bool mask `[L, L]`, True = may not attend, and a bool mask `[B, L]`, True = padding; "default"
returns the weights too. "packed" is `MultiheadAttention.packed` with packing and unpacking, against `nn.
MultiheadAttention` with `need_weights=False`.

Useful work: attention's as in `bench_attention`, and four products of all real positions with `[D, D]`; backward twice
those. Bytes: input, output and parameters, and their gradients.
"""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastformer
from benchmarks.competitors.known import require
from benchmarks.competitors.ops import FP32_TOLERANCE, fp64_results
from benchmarks.harness.attention_case import AttentionCase, AttentionShape, attention_case, case_name
from benchmarks.harness.clock import Work
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


def formula(p: AttentionCase, x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute multi-head attention `[B, L, D]` -> `[B, L, D]` in plain ops (Vaswani et al. 2017, section 3.2.2)."""
    weight, bias, out_weight, out_bias = parameters
    mixed = F.linear(x, weight, bias).view(*x.shape[:2], 3, p.heads, p.head_size)
    q, k, v = mixed.permute(2, 0, 3, 1, 4)  # [B, H, L, K]
    scores = (q @ k.transpose(-1, -2)) * p.head_size**-0.5  # [B, H, L, L]
    attended = scores.masked_fill(p.look_ahead, -torch.inf).softmax(-1) @ v
    return F.linear(attended.transpose(1, 2).flatten(2), out_weight, out_bias)


def expected(p: AttentionCase, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return output and gradients in fp64, by the sequence: causality alone hides padding on the right."""
    x, *parameters = inputs
    rows = [fp64_results(partial(formula, p), [x[b : b + 1], *parameters], upstream[b : b + 1]) for b in range(p.batch)]
    outputs, gradients, *of_parameters = zip(*rows, strict=True)
    return [torch.cat(outputs), torch.cat(gradients), *(torch.stack(x).sum(0) for x in of_parameters)]


def work(p: AttentionCase, direction: Direction) -> Work:
    """Return the operations of attention and projections, and the bytes of what is read and written once."""
    width, positions = p.heads * p.head_size, int(p.lengths.sum())
    times = {"forward": 1, "backward": 2, "both": 3}[direction]
    passes = {"forward": 2, "backward": 3, "both": 5}[direction]  # x, y; x, dy and dx
    operations = p.work(direction).operations + times * 8 * positions * width**2
    return Work(operations, p.dtype.itemsize * (passes * positions * width + times * 4 * width**2))


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

    def padded(net: nn.MultiheadAttention) -> Tensor:
        weights = call == "default"
        return net(x, x, x, key_padding_mask=~p.real, attn_mask=p.look_ahead, need_weights=weights)[0]

    def fused() -> Tensor:
        with fastformer.backend(race.backend):
            if call == "packed":
                return unpack(module.packed(pack(x, p.layout), p.layout, causal=True), p.layout)
            return padded(module)

    race.op(
        f"{case_name('nn.MultiheadAttention', SHAPES[shape], p)}, {call}",
        Op("fastformer", fused, inputs),
        Op(competitor, lambda: padded(other), inputs),
        upstream=upstream,
        expected=expected(p, inputs, upstream),
        tolerance=TOLERANCE if race.dtype == torch.bfloat16 else FP32_TOLERANCE,
        direction=direction,
        work=work(p, direction),
        goal=None if direction == "backward" or race.dtype == torch.float32 else GOALS[call],
    )
