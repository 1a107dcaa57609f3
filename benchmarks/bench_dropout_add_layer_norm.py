"""Dropout + residual + layer norm or RMS norm over bf16 rows, on a GPU: the step between two sublayers, both results.

Bytes: forward reads x and the residual, writes their sum and its norm; backward reads the
gradients of both results and the sum, writes the gradients of residual and x, which without dropout are one; all else
is small beside them.

Both sides draw dropout masks of their own, so values are compared at p = 0, the two results as one tensor, and time is
measured at p. Saved bytes should be at most 0.67 times eager's. Liger-Kernel's has no dropout: time is at p = 0.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.kernel_packages import liger
from benchmarks.competitors.ops import Function, eager_runs, leaves, race_functions, with_cpu
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

EPS = 1e-5
DROPOUT = 0.1
TOLERANCE = 1e-2  # bf16 rounds to 4e-3; a wrong formula is off by more than 1e-1
SHAPES = {
    "quick-8192x1024": (8192, 1024),
    "full-16384x512": (16384, 512),
    "full-32768x768": (32768, 768),
    "full-32768x4096": (32768, 4096),
    "quick-cpu": (2048, 512),
}
TINY = (6, 40)
GOALS: dict[tuple[str, Direction], float] = {("eager", "both"): 2.0, ("compile", "both"): 1.1, ("liger", "both"): 1.0}
RUNS = eager_runs(SHAPES, *((shape, "compile", "both") for shape in ("quick-8192x1024", "full-32768x4096")))
RMS_RUNS = with_cpu(
    [
        ("quick-8192x1024", "eager", "forward"),
        *((shape, other, "both") for shape in ("quick-8192x1024", "full-32768x4096") for other in ("eager", "liger")),
        ("quick-8192x1024", "compile", "both"),
    ],
    ("quick-cpu", "eager", "both"),
)
Steps = dict[str, Callable[..., tuple[Tensor, Tensor]]]


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


def _race(race: Race, rms: bool, shape: str, competitor: str, direction: Direction) -> None:
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
        goals=GOALS,
        timed=(_steps(rms, N, dropout_p), upstream.unbind()),
        saved_goal=0.67 if competitor == "eager" else None,
    )


@pytest.mark.parametrize(("shape", "competitor", "direction"), RUNS)
def bench_dropout_add_layer_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race(race, False, shape, competitor, direction)


@pytest.mark.parametrize(("shape", "competitor", "direction"), RMS_RUNS)
def bench_dropout_add_rms_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race(race, True, shape, competitor, direction)
