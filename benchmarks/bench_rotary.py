"""Rotary positions of queries and keys in bf16, on a GPU.

No matrix product. Bytes counted: each direction reads and writes every number once, reads a position a token (8), and
the tables once. The other side is the formula of Hugging Face's models, `x * cos + rotate_half(x) * sin`, in its dtype,
with tables that were gathered, doubled and rounded beforehand, as these models do once a pass, for all layers.
"""

import pytest
import torch
from torch import Tensor

from benchmarks.competitors.ops import eager_runs, leaves, race_functions
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2  # bf16 rounds to 4e-3, and their tables are rounded, too; a wrong angle is off by more than 1e-1
# Packed tokens, heads of queries and keys, numbers of each, whether pairs are interleaved.
CASES = {
    "quick-64": (16384, 16, 64, False),
    "full-128": (8192, 40, 128, False),  # Llama 3 8B: 32 and 8
    "full-128-interleaved": (8192, 40, 128, True),
    "quick-cpu": (2048, 8, 64, False),
}
TINY = (6, 3, 8)
POSITIONS = 2048
RUNS = eager_runs(CASES, ("quick-64", "compile", "both"))


def rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    """Map pairs (a, b) to (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.parametrize(("case", "competitor", "direction"), RUNS)
def bench_rotary(race: Race, case: str, competitor: str, direction: Direction) -> None:
    T, H, K, interleaved = CASES[case]
    if race.tiny:
        T, H, K = TINY
    positions = torch.arange(T, device=race.device) % POSITIONS
    rows = torch.arange(POSITIONS, dtype=torch.float64, device=race.device)
    angles = rows[:, None] * 10000.0 ** -(torch.arange(0, K, 2, dtype=torch.float64, device=race.device) / K)
    cos, sin = angles.cos().float(), angles.sin().float()

    def of_heads(table: Tensor, dtype: torch.dtype) -> Tensor:
        doubled = table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)
        return doubled[positions][:, None].to(dtype)

    wide = {dtype: (of_heads(cos, dtype), of_heads(sin, dtype)) for dtype in (race.dtype, torch.float64)}

    def eager(x: Tensor) -> Tensor:
        c, s = wide[x.dtype]
        return x * c + rotate_half(x, interleaved) * s

    moved = 4.0 * T * H * K + 8.0 * T + 4.0 * K * min(POSITIONS, T)
    race_functions(
        race,
        f"rotary {T:,} x {H} x {K}" + (", interleaved" if interleaved else ""),
        competitor,
        {"ours": lambda x: functional.rotary(x, positions, cos, sin, interleaved=interleaved), "eager": eager},
        leaves(race, (T, H, K)),
        direction=direction,
        work=Work(0.0, moved * (2 if direction == "both" else 1)),
        tolerance=TOLERANCE,
    )
