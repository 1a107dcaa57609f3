"""Dropout + residual + layer norm or RMS norm over bf16 rows, on a GPU: the step between two sublayers, both results.

Bytes counted for the floor: forward reads x and the residual, writes their sum and its norm; backward reads the
gradients of both results and the sum, writes the gradients of residual and x, which without dropout are one; all else
is small beside them.

Both sides draw dropout masks of their own, so that values are compared at p = 0 (the two results as one tensor), and
time is measured at p, with the results as they are. Saved bytes are to be at most 0.67 times eager's. Liger-Kernel's
has no dropout: beside it time is measured at p = 0.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.kernel_packages import liger
from benchmarks.competitors.ops import Function, leaves, race_functions, with_cpu
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
RUNS = with_cpu(
    [
        *((shape, "eager", direction) for shape in SHAPES if "cpu" not in shape for direction in ("forward", "both")),
        ("quick-8192x1024", "compile", "both"),
        ("full-32768x4096", "compile", "both"),
    ],
    ("quick-cpu", "eager", "both"),
)

RMS_RUNS = with_cpu(
    [
        ("quick-8192x1024", "eager", "forward"),
        *((shape, other, "both") for shape in ("quick-8192x1024", "full-32768x4096") for other in ("eager", "liger")),
        ("quick-8192x1024", "compile", "both"),
    ],
    ("quick-cpu", "eager", "both"),
)

Results = tuple[Tensor, Tensor]
Steps = dict[str, Callable[..., Results]]


def _dropped(x: Tensor, dropout_p: float) -> Tensor:
    return F.dropout(x, dropout_p) if dropout_p > 0.0 else x


def _layer_norm_steps(N: int, dropout_p: float) -> Steps:
    def eager(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Results:
        s = residual + _dropped(x, dropout_p)
        return F.layer_norm(s, (N,), w, b, EPS), s

    def ours(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Results:
        return functional.dropout_add_layer_norm(x, residual, N, w, b, eps=EPS, dropout_p=dropout_p)

    return {"ours": ours, "eager": eager}


def _rms_norm_steps(N: int, dropout_p: float) -> Steps:
    def eager(x: Tensor, residual: Tensor, w: Tensor) -> Results:
        s = residual + _dropped(x, dropout_p)
        return F.rms_norm(s, (N,), w, EPS), s

    def ours(x: Tensor, residual: Tensor, w: Tensor) -> Results:
        return functional.dropout_add_rms_norm(x, residual, N, w, eps=EPS, dropout_p=dropout_p)

    def theirs(x: Tensor, residual: Tensor, w: Tensor) -> Results:
        return liger("fused_add_rms_norm", "liger")(x, residual, w, EPS)  # type: ignore[no-any-return]

    return {"ours": ours, "eager": eager, "liger": theirs}


def _as_one(results: Callable[..., Results]) -> Function:
    return lambda *inputs: torch.stack(results(*inputs))


def work(elements: int, dropout_p: float) -> dict[Direction, Work]:
    """No matrix products; passes over tensors of so many bf16 elements."""
    backward = 5 if dropout_p > 0.0 else 4
    passes: dict[Direction, int] = {"forward": 4, "backward": backward, "both": 4 + backward}
    return {direction: Work(0.0, 2.0 * elements * n) for direction, n in passes.items()}


def _race_steps(
    race: Race,
    name: str,
    shape: str,
    competitor: str,
    direction: Direction,
    steps: Callable[[int, float], Steps],
    parameters: int,
) -> None:
    M, N = TINY if race.tiny else SHAPES[shape]
    dropout_p = 0.0 if competitor == "liger" else DROPOUT
    upstream = torch.randn(2, M, N, device=race.device).to(race.dtype)
    race.note(compared_at_dropout=0.0, timed_at_dropout=dropout_p)
    if competitor == "eager":
        race.memory_goals(saved=0.67)
    race_functions(
        race,
        f"dropout + residual + {name} {M:,} x {N:,}",
        competitor,
        {side: _as_one(function) for side, function in steps(N, 0.0).items()},
        leaves(race, (M, N), (M, N), *[(N,)] * parameters),
        direction=direction,
        work=work(M * N, dropout_p),
        tolerance=TOLERANCE,
        upstream=upstream,
        goals=GOALS,
        timed=(steps(N, dropout_p), upstream.unbind()),
    )


@pytest.mark.parametrize(("shape", "competitor", "direction"), RUNS)
def bench_dropout_add_layer_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race_steps(race, "layer norm", shape, competitor, direction, _layer_norm_steps, 2)


@pytest.mark.parametrize(("shape", "competitor", "direction"), RMS_RUNS)
def bench_dropout_add_rms_norm(race: Race, shape: str, competitor: str, direction: Direction) -> None:
    _race_steps(race, "RMS norm", shape, competitor, direction, _rms_norm_steps, 1)
