"""What gives tokens their positions, in bf16 on a GPU: rotary positions, and word embedding plus a table of positions.

No matrix product. Bytes counted for rotary: each direction reads and writes every number once, reads a position a token
(8), and the tables once. The other side is the formula of Hugging Face's models, `x * cos + rotate_half(x) * sin`, in
its dtype, with tables that were gathered, doubled and rounded beforehand, as these models do once a pass, for all
layers.

For the embedding, scaled and with dropout: forward reads ids and positions (8 each) and a row of the weight a token,
and writes a row; the table is small and read once. Backward reads the gradient of the output and writes those of weight
and table whole, which both sides do. With dropout both sides draw masks of their own, so that their values are compared
at p = 0, and their time at p.
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

TOLERANCE = 1e-2  # bf16 rounds to 4e-3, and the other side's tables, too; a wrong angle is off by more than 1e-1
# Packed tokens, heads of queries and keys, numbers of each, whether pairs are interleaved.
ROTARY = {
    "quick-64": (16384, 16, 64, False),
    "full-128": (8192, 40, 128, False),  # Llama 3 8B: 32 and 8
    "full-128-interleaved": (8192, 40, 128, True),
    "quick-cpu": (2048, 8, 64, False),
}
POSITIONS = 2048
# Sentences, their length, width, vocabulary, dropout.
EMBEDDING = {
    "quick-512": (128, 128, 512, 32000, 0.1),
    "full-512-no-dropout": (128, 128, 512, 32000, 0.0),
    "full-1024": (8, 2048, 1024, 50304, 0.1),
    "quick-cpu": (64, 32, 256, 8000, 0.1),
}


def rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    """Map pairs (a, b) to (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.parametrize(("case", "competitor", "direction"), eager_runs(ROTARY, ("quick-64", "compile", "both")))
def bench_rotary(race: Race, case: str, competitor: str, direction: Direction) -> None:
    T, H, K, interleaved = ROTARY[case]
    if race.tiny:
        T, H, K = 6, 3, 8
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


@pytest.mark.parametrize(("case", "competitor", "direction"), eager_runs(EMBEDDING, ("quick-512", "compile", "both")))
def bench_embedding(race: Race, case: str, competitor: str, direction: Direction) -> None:
    B, L, D, V, p = EMBEDDING[case]
    if race.tiny:
        B, L, D, V = 2, 5, 24, 16
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
