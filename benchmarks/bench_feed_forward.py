"""The feed-forward layer in bf16, on a GPU: two matrix products, and what stands between them.

Operations: 2 T D F for each product, as many again for the gradient of each input and of each weight; a gated layer's
first product is twice as wide. Bytes: forward reads x and both weights and writes y; backward reads x, dy and both
weights and writes dx and the gradients of the weights. Hidden activations need not be in memory and are not counted.

With dropout both sides draw masks of their own, so values are compared at p = 0, and time is measured at p. Saved bytes
should be at most 0.45 times eager's if a mask is saved, and 0.09 times with `recompute`.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.kernel_packages import liger
from benchmarks.competitors.ops import race_functions, with_cpu
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Race
from fastformer import functional
from fastformer.functional.feed_forward.op import Activation

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2  # a chain of three bf16 roundings of 4e-3; a wrong activation is off by more than 1e-1


class FeedForwardShape(NamedTuple):
    """A layer, and how it is called."""

    tokens: int
    width: int
    hidden: int
    activation: Activation = "gelu"
    dropout_p: float = 0.0
    recompute: bool = False


SIZES = [(512, 2048), (768, 3072), (1024, 4096), (2048, 8192), (4096, 16384)]
# By activation, dropout and width, from eager and from torch.compile. The gain is bytes moved for each hidden
# activation. Without dropout eager moves 12, forward and backward (4 + 6, and 2 for the bias's sum), fastformer 4 + 8,
# of ReLU 4 + 6; with dropout eager moves 10 more, fastformer none. At 600 TFLOP/s and 4.2 TB/s the products, 12 D
# operations, are worth D / 12 bytes.
GOALS: dict[tuple[str, bool, int], tuple[float, float]] = {
    **{(name, False, 512): (1.05, 1.0) for name in ("relu", "gelu", "gelu_tanh")},
    **{("gelu", False, D): (1.0, 1.0) for D in (768, 1024, 2048, 4096)},
    ("gelu", True, 512): (1.15, 1.0),
    ("relu", True, 512): (1.2, 1.0),
    ("relu", True, 1024): (1.1, 1.03),
    ("relu", True, 4096): (1.0, 1.0),
}
LIGER = ("liger", "liger-cute")
CASES = {
    "quick-gelu": FeedForwardShape(16384, 512, 2048),
    "quick-relu-dropout": FeedForwardShape(16384, 1024, 4096, "relu", 0.1),
    **{f"full-gelu-4096-{d}": FeedForwardShape(4096, d, f) for d, f in SIZES},
    **{f"full-gelu-16384-{d}": FeedForwardShape(16384, d, f) for d, f in SIZES[1:]},
    **{f"full-relu-dropout-{t}-512": FeedForwardShape(t, 512, 2048, "relu", 0.1) for t in (4096, 16384)},
    "full-relu-dropout-4096-4096": FeedForwardShape(4096, 4096, 16384, "relu", 0.1),
    "full-relu": FeedForwardShape(16384, 512, 2048, "relu"),
    "full-gelu_tanh": FeedForwardShape(16384, 512, 2048, "gelu_tanh"),
    "full-gelu-dropout": FeedForwardShape(16384, 512, 2048, "gelu", 0.1),
    "full-gelu-dropout-recompute": FeedForwardShape(16384, 512, 2048, "gelu", 0.1, recompute=True),
    "full-swiglu": FeedForwardShape(16384, 1024, 4096, "swiglu"),
    "quick-cpu": FeedForwardShape(1024, 256, 1024, "gelu", 0.1),
}
# A compilation takes seconds and each case costs one, with dropout two.
COMPILED = ["quick-gelu", "quick-relu-dropout", "full-swiglu", *(f"full-gelu-16384-{d}" for d, _ in SIZES[1:])]
RUNS = with_cpu(
    [
        *((name, "eager", "both") for name in CASES if "cpu" not in name),
        *((name, "compile", "both") for name in COMPILED),
        ("quick-gelu", "eager", "forward"),
        ("full-swiglu", "eager", "forward"),
        *(("full-swiglu", name, direction) for name in LIGER for direction in ("forward", "both")),
    ],
    ("quick-cpu", "eager", "both"),
)


def _activate(h: Tensor, activation: Activation) -> Tensor:
    if activation == "swiglu":
        gate, value = h.chunk(2, -1)
        return F.silu(gate) * value
    if activation == "relu":
        return F.relu(h)
    return F.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def _liger_swiglu(competitor: str, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    # Takes gate and value as two matrices, from two products. Its backward pass writes over saved tensors, so it is
    # never timed alone. Its GEGLU is the tanh form, fastformer's the exact one: no comparison.
    half = w1.shape[0] // 2
    gate, value = F.linear(x, w1[:half], b1[:half]), F.linear(x, w1[half:], b1[half:])
    return F.linear(liger("swiglu", competitor)(gate, value), w2, b2)


def _functions(case: FeedForwardShape, dropout_p: float) -> dict[str, Any]:
    def eager(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        a = _activate(F.linear(x, w1, b1), case.activation)
        return F.linear(F.dropout(a, dropout_p) if dropout_p > 0.0 else a, w2, b2)

    options = {"activation": case.activation, "dropout_p": dropout_p, "recompute": case.recompute}
    fused = partial(functional.feed_forward, **options)  # type: ignore[arg-type]
    return {"ours": fused, "eager": eager, **{name: partial(_liger_swiglu, name) for name in LIGER}}


def work(case: FeedForwardShape, direction: Direction) -> Work:
    """Return the least work of a direction, as the top of this file counts it."""
    T, D, F_ = case.tokens, case.width, case.hidden
    halves = 3 if case.activation == "swiglu" else 2  # products of T x D x F
    products = 2.0 * T * D * F_ * halves
    ends, weights = 2.0 * T * D, 2.0 * D * F_ * halves  # bytes of x, and of both weights
    if direction == "forward":
        return Work(products, 2 * ends + weights)
    return Work(3 * products, 5 * ends + 3 * weights)


@pytest.mark.parametrize(("case", "competitor", "direction"), RUNS)
def bench_feed_forward(race: Race, case: str, competitor: str, direction: Direction) -> None:
    shape = CASES[case]
    eager, compiled = GOALS.get((shape.activation, shape.dropout_p > 0.0, shape.width), (None, None))
    if race.tiny:
        shape = shape._replace(tokens=6, width=16, hidden=24)
    T, D, F_, activation, p, recompute = shape
    wide = 2 * F_ if activation == "swiglu" else F_
    # So scaled that no layer grows or shrinks what it gets.
    sizes = [((T, D), 1.0), ((wide, D), D**-0.5), ((wide,), 0.1), ((D, F_), F_**-0.5), ((D,), 0.1)]
    drawn = [torch.randn(size, device=race.device) * scale for size, scale in sizes]
    inputs = [x.to(race.dtype).requires_grad_() for x in drawn]
    goal = {"eager": eager, "compile": compiled}.get(competitor)
    name = f"feed-forward {activation} {T:,} x ({D:,}, {F_:,})"
    race_functions(
        race,
        name + (f", dropout {p:g}" if p else "") + (", recompute" if recompute else ""),
        competitor,
        _functions(shape, 0.0),
        inputs,
        direction=direction,
        work=work(shape, direction),
        tolerance=TOLERANCE,
        goals={} if goal is None or recompute else {(competitor, "both"): goal},
        timed=(_functions(shape, p), torch.randn_like(inputs[0])) if p > 0.0 else None,
        saved_goal=(0.09 if recompute else 0.45) if p > 0.0 and competitor == "eager" else None,
    )
