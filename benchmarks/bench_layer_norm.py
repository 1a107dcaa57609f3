"""Norms over bf16 rows, on a GPU: layer norm, RMS norm, and dropout + residual + one of them, between two sublayers.

Bytes of a norm: forward reads x and writes y; backward reads x and dy and writes dx. Of a step: forward reads x and the
residual, writes their sum and its norm; backward reads the gradients of both results and the sum, writes the gradients
of residual and x, which without dropout are one. All else is small beside them.

Both sides draw dropout masks of their own, so values are compared at p = 0, the two results as one tensor, and time is
measured at p. Saved bytes should be at most 0.67 times eager's. Liger-Kernel's step has no dropout: time is at p = 0.
On a CPU only the step is compared: fastformer's norms are torch's own there.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.kernel_packages import QUACK, liger
from benchmarks.competitors.ops import Function, eager_runs, leaves, race_functions, with_cpu
from benchmarks.harness.clock import Work
from benchmarks.harness.race import DIRECTIONS, Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

EPS, DROPOUT = 1e-5, 0.1
TOLERANCE = 1e-2  # bf16 rounds to 4e-3; a wrong formula is off by more than 1e-1
SHAPES = {
    "quick-8192x1024": (8192, 1024),
    "full-4096x512": (4096, 512),
    "full-16384x512": (16384, 512),
    "full-32768x768": (32768, 768),
    "full-16384x2048": (16384, 2048),
    "full-32768x4096": (32768, 4096),
    "full-8192x8192": (8192, 8192),
    "quick-cpu": (2048, 512),
}
TWO_SHAPES = ("quick-8192x1024", "full-32768x4096")
TINY = (6, 40)
LIGER = ("liger", "liger-cute")
GOALS: dict[tuple[str, Direction], float] = {
    ("eager", "forward"): 1.2,
    ("eager", "backward"): 2.0,
    ("compile", "forward"): 1.0,
    ("compile", "backward"): 1.0,
    ("liger", "forward"): 1.0,
    ("liger", "backward"): 1.5,
    ("quack", "backward"): 0.9,
}
STEP_GOALS: dict[tuple[str, Direction], float] = {
    ("eager", "both"): 2.0,
    ("compile", "both"): 1.1,
    ("liger", "both"): 1.0,
}
RUNS = eager_runs(
    ["quick-8192x1024", "full-16384x512", "full-32768x768", "full-32768x4096"],
    *((shape, "compile", "both") for shape in TWO_SHAPES),
)
RMS_RUNS = with_cpu(
    [
        ("quick-8192x1024", "eager", "forward"),
        *((shape, other, "both") for shape in TWO_SHAPES for other in ("eager", "liger")),
        ("quick-8192x1024", "compile", "both"),
    ],
    ("quick-cpu", "eager", "both"),
)
Steps = dict[str, Callable[..., tuple[Tensor, Tensor]]]


def _functions(rms: bool, N: int) -> dict[str, Function]:
    op = "rms_norm" if rms else "layer_norm"
    fused, eager = getattr(functional, op), getattr(F, op)
    return {
        "ours": lambda x, *parameters: fused(x, N, *parameters, eps=EPS),
        "eager": lambda x, *parameters: eager(x, (N,), *parameters, EPS),
        "quack": lambda *inputs: QUACK[op](*inputs, EPS),
        **{name: lambda *inputs, name=name: liger(op, name)(*inputs, EPS) for name in LIGER},
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("competitor", ["eager", "compile", *LIGER, "quack"])
@pytest.mark.parametrize(
    ("op", "shape"),
    [
        *(("layer norm", shape) for shape in SHAPES if shape != "quick-cpu"),
        *(("RMS norm", shape) for shape in TWO_SHAPES),
    ],
)
def bench_layer_norm(race: Race, op: str, shape: str, competitor: str, direction: Direction) -> None:
    M, N = TINY if race.tiny else SHAPES[shape]
    rms = op == "RMS norm"
    race_functions(
        race,
        f"{op} {M:,} x {N:,}",
        competitor,
        _functions(rms, N),
        leaves(race, (M, N), *[(N,)] * (1 if rms else 2)),
        direction=direction,
        work=Work(0.0, 2.0 * M * N * {"forward": 2, "backward": 3, "both": 5}[direction]),
        tolerance=TOLERANCE,
        goals=GOALS,
    )


def _steps(rms: bool, N: int, dropout_p: float) -> Steps:
    fused = functional.dropout_add_rms_norm if rms else functional.dropout_add_layer_norm
    norm: Callable[..., Tensor] = F.rms_norm if rms else F.layer_norm

    def eager(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        s = residual + (F.dropout(x, dropout_p) if dropout_p > 0.0 else x)
        return norm(s, (N,), *parameters, EPS), s

    return {
        "ours": lambda x, residual, *parameters: fused(x, residual, N, *parameters, eps=EPS, dropout_p=dropout_p),
        "eager": eager,
        "liger": lambda *inputs: liger("fused_add_rms_norm", "liger")(*inputs, EPS),
    }


def _as_one(function: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    return lambda *inputs: torch.stack(function(*inputs))


def _race_step(race: Race, rms: bool, shape: str, competitor: str, direction: Direction) -> None:
    M, N = TINY if race.tiny else SHAPES[shape]
    dropout_p = 0.0 if competitor == "liger" else DROPOUT
    upstream = torch.randn(2, M, N, device=race.device).to(race.dtype)
    passes = 4 if direction == "forward" else 9 if dropout_p > 0.0 else 8
    race_functions(
        race,
        f"dropout + residual + {'RMS norm' if rms else 'layer norm'} {M:,} x {N:,}",
        competitor,
        {side: _as_one(function) for side, function in _steps(rms, N, 0.0).items()},
        leaves(race, (M, N), (M, N), *[(N,)] * (1 if rms else 2)),
        direction=direction,
        work=Work(0.0, 2.0 * M * N * passes),
        tolerance=TOLERANCE,
        upstream=upstream,
        goals=STEP_GOALS,
        timed=(_steps(rms, N, dropout_p), upstream.unbind()),
        saved_goal=0.67 if competitor == "eager" else None,
    )


@pytest.mark.parametrize(("shape", "competitor", "direction"), RUNS)
def bench_dropout_add_layer_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race_step(race, False, shape, competitor, direction)


@pytest.mark.parametrize(("shape", "competitor", "direction"), RMS_RUNS)
def bench_dropout_add_rms_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race_step(race, True, shape, competitor, direction)
