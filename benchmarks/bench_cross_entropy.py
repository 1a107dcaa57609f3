"""Output projection + cross entropy in bf16, on a GPU: label smoothing 0.1, and a fifth of the targets ignored.

A competitor that smooths nothing is compared without smoothing. On a CPU a smaller one in fp32, against torch's two
ways.

Operations of the rows that count: 2 T D V for the logits, and as many for the gradient of x and for that of the weight.
Bytes: forward reads x, weight and targets; with backward it writes the gradients of x and weight, too. The logits need
not be in memory and are not counted. fastformer computes the gradients with the loss, so backward is not timed alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.kernel_packages import QUACK, liger_loss
from benchmarks.competitors.ops import Function, race_functions, with_cpu
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

SMOOTHING = 0.1
IGNORED = 0.2  # of the targets
# bf16 logits, their gradient in bf16, and in Liger-Kernel's first mode a bf16 sum over up to 64 chunks: sqrt(32) 1e-3.
TOLERANCE = 2e-2
TINY = (10, 16, 40)
_TRUTH_ROWS = 4096  # at once in fp64: 1.6 GB of logits

EAGER_GOALS = {512: 1.6, 768: 1.3, 1024: 1.3}  # by D
GOALS = {"compile": 1.3, "liger": 2.0, "liger-fp32": 2.0, "liger-cute": 0.7, "liger-cute-sm90": 0.7}
GOALS |= {"torch-chunked": 1.0, "quack": 0.9}
# By rows. Eager keeps 6 bytes a logit at its peak (log-softmax, its gradient, that of the logits; counted on a CPU),
# ours 2 a logit of a chunk and 4 an element of the weight's gradient.
PEAK_GOALS = {4096: 0.3, 16384: 0.1}
LIGER = ("liger", "liger-fp32", "liger-cute", "liger-cute-sm90")
PLAIN = ("torch-chunked", "liger-cute-sm90", "quack")  # smooth nothing
QUICK = (16384, 512, 32000)
COMPARED = [QUICK, (4096, 512, 16384), (16384, 1024, 50304), (16384, 768, 32000)]  # with every competitor
GRID = [(T, D, V) for T in (4096, 16384) for D in (512, 768, 1024) for V in (16384, 32000, 50304)]
ON_CPU = (512, 256, 8000)
RUNS = with_cpu(
    [
        *((shape, "eager", "both") for shape in GRID),
        *((shape, name, "both") for shape in COMPARED for name in ("compile", *LIGER, "torch-chunked", "quack")),
        (QUICK, "eager", "forward"),
        (QUICK, "compile", "forward"),
    ],
    (ON_CPU, "eager", "both"),
    (ON_CPU, "torch-chunked", "both"),
    name=lambda shape: f"{'quick' if shape in (QUICK, ON_CPU) else 'full'}-{'x'.join(map(str, shape))}",
)


def _functions(target: Tensor, smoothing: float) -> dict[str, Function]:
    def chunked(x: Tensor, w: Tensor) -> Tensor:
        # Of torch 2.13, which takes chunks only where nothing is smoothed.
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x, w, target, label_smoothing=smoothing, options=options)

    return {
        "ours": lambda x, w: functional.linear_cross_entropy(x, w, target, label_smoothing=smoothing),
        "eager": lambda x, w: F.cross_entropy(F.linear(x, w), target, label_smoothing=smoothing),
        "torch-chunked": chunked,
        "quack": lambda x, w: QUACK["loss"](x, w, target),
        **{name: lambda x, w, name=name: liger_loss(name, x, w, target, smoothing) for name in LIGER},
    }


def truth(x: Tensor, w: Tensor, target: Tensor, smoothing: float) -> list[Tensor]:
    """Return loss and gradients of x and w in fp64, some rows at a time, since the logits of all might not fit."""
    wide = w.detach().double().requires_grad_()
    loss, dw = x.new_zeros((), dtype=torch.float64), torch.zeros_like(wide)
    dx = torch.empty_like(x, dtype=torch.float64)
    counted = (target != -100).sum()
    for start in range(0, len(x), _TRUTH_ROWS):
        rows = slice(start, start + _TRUTH_ROWS)
        chunk = x[rows].detach().double().requires_grad_()
        total = F.cross_entropy(F.linear(chunk, wide), target[rows], label_smoothing=smoothing, reduction="sum")
        total = total / counted
        dx[rows], dw_of_rows = torch.autograd.grad(total, (chunk, wide))
        dw += dw_of_rows
        loss += total.detach()
    return [loss, dx, dw]


@pytest.mark.parametrize(("shape", "competitor", "direction"), RUNS)
def bench_linear_cross_entropy(race: Race, shape: tuple[int, int, int], competitor: str, direction: Direction) -> None:
    T, D, V = TINY if race.tiny else shape
    x = torch.randn(T, D, device=race.device)
    w = torch.randn(V, D, device=race.device) * D**-0.5  # logits of unit variance, as those of an untrained model
    inputs = [x.to(race.dtype).requires_grad_(), w.to(race.dtype).requires_grad_()]
    target = torch.randint(V, (T,), device=race.device)
    target[torch.rand(T, device=race.device) < IGNORED] = -100
    target[0], target[-1] = -100, 0
    smoothing = 0.0 if competitor in PLAIN else SMOOTHING
    goal = EAGER_GOALS.get(shape[1]) if competitor == "eager" else GOALS[competitor]
    products, read = 2.0 * T * D * V * (1 - IGNORED), 2.0 * (T * D + V * D) + 8.0 * T
    work = Work(products, read) if direction == "forward" else Work(3 * products, read + 2.0 * (T * D + V * D))
    race_functions(
        race,
        f"linear + cross entropy {T:,} x {D:,} x {V:,}" + ("" if smoothing else ", not smoothed"),
        competitor,
        _functions(target, smoothing),
        inputs,
        direction=direction,
        work=work,
        tolerance=TOLERANCE,
        upstream=torch.ones((), device=race.device),
        expected=truth(inputs[0], inputs[1], target, smoothing),
        goals={} if goal is None else {(competitor, "both"): goal},
        peak_goal=PEAK_GOALS.get(T) if (competitor, direction) == ("eager", "both") else None,
    )
