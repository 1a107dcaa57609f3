"""Layer norm and RMS norm over bf16 rows, on a GPU; on a CPU fastformer's are torch's own.

Bytes: forward reads x and writes y; backward reads x and dy and writes dx; gradients of weight
and bias, means and deviations are small beside them.
"""

import pytest
import torch.nn.functional as F

from benchmarks.competitors.kernel_packages import QUACK, liger
from benchmarks.competitors.ops import Function, leaves, race_functions
from benchmarks.harness.clock import Work
from benchmarks.harness.race import DIRECTIONS, Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

EPS = 1e-5
TOLERANCE = 1e-2  # bf16 rounds to 4e-3; a wrong formula is off by more than 1e-1
SHAPES = {
    "quick-8192x1024": (8192, 1024),
    "full-4096x512": (4096, 512),
    "full-16384x512": (16384, 512),
    "full-32768x768": (32768, 768),
    "full-16384x2048": (16384, 2048),
    "full-32768x4096": (32768, 4096),
    "full-8192x8192": (8192, 8192),
}
RMS_SHAPES = ("quick-8192x1024", "full-32768x4096")
TINY = (6, 40)
PASSES = {"forward": 2, "backward": 3, "both": 5}  # over tensors of bf16
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


def _functions(rms: bool, N: int) -> dict[str, Function]:
    if rms:
        return {
            "ours": lambda x, w: functional.rms_norm(x, N, w, eps=EPS),
            "eager": lambda x, w: F.rms_norm(x, (N,), w, EPS),
            "quack": lambda x, w: QUACK["rms_norm"](x, w, EPS),
            **{name: lambda x, w, name=name: liger("rms_norm", name)(x, w, EPS) for name in LIGER},
        }
    return {
        "ours": lambda x, w, b: functional.layer_norm(x, N, w, b, eps=EPS),
        "eager": lambda x, w, b: F.layer_norm(x, (N,), w, b, EPS),
        "quack": lambda x, w, b: QUACK["layer_norm"](x, w, b, EPS),
        **{name: lambda x, w, b, name=name: liger("layer_norm", name)(x, w, b, EPS) for name in LIGER},
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("competitor", ["eager", "compile", *LIGER, "quack"])
@pytest.mark.parametrize(
    ("op", "shape"), [*(("layer norm", shape) for shape in SHAPES), *(("RMS norm", shape) for shape in RMS_SHAPES)]
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
        work=Work(0.0, 2.0 * M * N * PASSES[direction]),
        tolerance=TOLERANCE,
        goals=GOALS,
    )
