"""Word embedding, scaled, plus a table of positions, with dropout, in bf16, on a GPU.

No matrix product. Bytes counted: forward reads ids and positions (8 each) and a row of the weight a token, and writes
a row; the table is small and read once. Backward reads the gradient of the output and writes those of weight and table
whole, which both sides do.

With dropout both sides draw masks of their own, so that their values are compared at p = 0, and their time at p.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.competitors.ops import Function, eager_runs, leaves, race_functions
from benchmarks.harness.clock import Work
from benchmarks.harness.race import Direction, Race
from fastformer import functional

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2  # bf16 rounds to 4e-3; a wrong formula is off by more than 1e-1
# Sentences, their length, width, vocabulary, dropout.
CASES = {
    "quick-512": (128, 128, 512, 32000, 0.1),
    "full-512-no-dropout": (128, 128, 512, 32000, 0.0),
    "full-1024": (8, 2048, 1024, 50304, 0.1),
    "quick-cpu": (64, 32, 256, 8000, 0.1),
}
TINY = (2, 5, 24, 16)
RUNS = eager_runs(CASES, ("quick-512", "compile", "both"))


@pytest.mark.parametrize(("case", "competitor", "direction"), RUNS)
def bench_embedding(race: Race, case: str, competitor: str, direction: Direction) -> None:
    B, L, D, V, p = CASES[case]
    if race.tiny:
        B, L, D, V = TINY
    ids = torch.randint(V, (B, L), device=race.device)
    positions = torch.arange(L, device=race.device).expand(B, L)
    scale = D**0.5

    def functions(dropout_p: float) -> dict[str, Function]:
        def eager(w: Tensor, table: Tensor) -> Tensor:
            out = F.embedding(ids, w) * scale + F.embedding(positions, table)
            return F.dropout(out, dropout_p) if dropout_p > 0.0 else out

        def ours(w: Tensor, table: Tensor) -> Tensor:
            return functional.embedding(ids, w, table, positions, scale=scale, dropout_p=dropout_p)

        return {"ours": ours, "eager": eager}

    forward, backward = 16.0 * B * L + 2.0 * D * (2 * B * L + L), 2.0 * D * (B * L + V + L)
    race_functions(
        race,
        f"embedding {B} x {L:,} x {D:,} of {V:,}" + (f", dropout {p:g}" if p > 0.0 else ""),
        competitor,
        functions(0.0),
        leaves(race, (V, D), (L, D)),
        direction=direction,
        work=Work(0.0, forward + (backward if direction == "both" else 0.0)),
        tolerance=TOLERANCE,
        timed=(functions(p), torch.randn(B, L, D, device=race.device).to(race.dtype)) if p > 0.0 else None,
    )
