"""Tile sizes of the attention kernels, as tables: a call takes the first row that fits it.

A row fits a call if

- it names the GPU's architecture (`host.architecture`), or none. AMD's GPUs also take the rows of sm_86, whose shared
  memory is closest to their 64 KiB;
- it names the products of the call, or none: 16 (of 16 bits), tf32, or fp32 (exact);
- its head width and its number of queries are not below those of the call;
- the call has all features that it names.

The features of a call are

- heavy: something to read or compute for each score: a mask, a bias, a softcap, gradients of weights;
- masked: a mask or a softcap; bias: by distance; key mask; dropout;
- narrow values: of a smaller head width than queries and keys.

The head width is a power of two; for tf32 it is twice that of the head (`problem.head_width`). Head sizes above 128 are
multiplied exactly in place of tf32, so the rows of tf32 end at a width of 256.

**The rows of sm_90** in 16 bits, and in exact fp32 to a width of 128, are the fastest of 14 to 47 tiles that were timed
on an H200 for calls without features (benchmarks/NOTES.md). In 16 bits to a width of 128, four warps and two or more
blocks on a multiprocessor mostly won over larger tiles: while one block computes exponentials, another multiplies.

**The other rows** are the largest tiles that spill nothing and compute no product twice, and of these the ones with the
fewest instructions, by what the compiler reports (`python -m benchmarks.codegen`). No GPU has timed others. In 16 bits
a warp has 16 rows, as many as its matrix instruction. Short sequences take smaller tiles, so that less of the last one
is wasted and more blocks run. Masks and softcap take registers. fp32 on plain cores is bound by registers.

`python -m benchmarks.tuning --write-tiles` writes tiles that were measured to be faster to `measured_tiles.json`, by
`Call.key`. They replace those of the tables.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

MEASURED = Path(__file__).with_name("measured_tiles.json")
_ANY = 1 << 31


class Call(NamedTuple):
    """The properties of a call that decide its tiles."""

    family: str  # a name in TILES
    architecture: str
    products: str  # "16", "tf32" or "fp32"
    width: int
    queries: int
    features: frozenset[str]

    @property
    def key(self) -> str:
        """The key of calls that share a measured tile; lengths are grouped in three classes."""
        length = "1-128" if self.queries <= 128 else "129-511" if self.queries < 512 else "512-"
        return " ".join((*self[:3], str(self.width), length, ",".join(sorted(self.features)))).rstrip()


class Row(NamedTuple):
    """A tile, and the calls that take it."""

    architectures: str
    products: str
    width: int
    queries: int
    features: str  # separated by commas
    tile: tuple[int, ...]

    def fits(self, call: Call) -> bool:
        """Return whether a call can take the row."""
        named = self.architectures.split()
        if named and call.architecture not in named and not (call.architecture[:3] == "gfx" and "sm_86" in named):
            return False
        if self.products not in ("", call.products) or call.width > self.width or call.queries > self.queries:
            return False
        return not self.features or call.features.issuperset(self.features.split(", "))


BLOCKS = ("BLOCK_T", "BLOCK_S", "num_warps", "num_stages")
_NAMES = {"decode": ("BLOCK_S", "num_warps", "num_stages")}  # of the numbers of a tile; BLOCKS for other families

TILES: dict[str, tuple[Row, ...]] = {
    "forward": (
        Row("sm_90", "fp32", 64, 128, "", (64, 32, 4, 1)),
        Row("sm_90", "fp32", 64, _ANY, "heavy", (64, 64, 4, 1)),
        Row("sm_90", "fp32", 128, _ANY, "", (128, 64, 8, 1)),
        Row("", "fp32", 32, _ANY, "", (32, 32, 8, 1)),
        Row("", "fp32", 64, _ANY, "heavy", (32, 32, 8, 1)),
        Row("", "fp32", 64, _ANY, "", (32, 32, 4, 1)),
        Row("", "fp32", 128, _ANY, "", (32, 32, 8, 1)),
        Row("", "fp32", 256, _ANY, "", (16, 32, 8, 1)),
        Row("sm_100", "tf32", 32, _ANY, "heavy", (64, 32, 8, 2)),
        Row("sm_100", "", 32, _ANY, "heavy", (64, 32, 4, 2)),
        Row("", "", 32, _ANY, "heavy", (64, 32, 4, 3)),
        Row("", "", 32, 128, "", (64, 32, 4, 3)),
        Row("sm_86", "tf32", 32, _ANY, "", (64, 64, 4, 2)),
        Row("", "", 32, 511, "", (64, 64, 4, 3)),
        Row("", "", 32, _ANY, "dropout", (64, 64, 4, 3)),
        Row("sm_90", "16", 32, _ANY, "", (128, 64, 4, 3)),
        Row("", "", 32, _ANY, "", (64, 64, 4, 3)),
        Row("sm_80 sm_86", "", 64, _ANY, "heavy", (64, 32, 4, 2)),
        Row("sm_80 sm_86", "", 64, 128, "", (64, 32, 4, 2)),
        Row("sm_90", "16", 64, _ANY, "heavy", (64, 64, 4, 2)),
        Row("", "", 64, _ANY, "heavy", (64, 32, 4, 3)),
        Row("", "", 64, 128, "", (64, 32, 4, 3)),
        Row("sm_86", "", 64, _ANY, "", (64, 64, 4, 3)),
        Row("sm_90", "16", 64, 511, "", (64, 32, 4, 3)),
        Row("", "", 64, 511, "", (64, 64, 4, 3)),
        Row("sm_90", "16", 64, _ANY, "dropout", (64, 64, 4, 2)),
        Row("sm_90", "16", 64, _ANY, "", (128, 64, 4, 3)),
        Row("", "", 64, _ANY, "", (128, 64, 8, 3)),
        Row("sm_90", "16", 128, _ANY, "heavy", (64, 64, 4, 2)),
        Row("sm_86", "16", 128, _ANY, "heavy", (64, 32, 4, 2)),
        Row("sm_80 sm_86", "", 128, _ANY, "heavy", (128, 32, 8, 2)),
        Row("", "", 128, _ANY, "heavy", (64, 32, 8, 2)),
        Row("", "", 128, 511, "", (64, 32, 4, 2)),
        Row("sm_80 sm_86", "tf32", 128, _ANY, "", (64, 32, 4, 2)),
        Row("sm_80 sm_86", "16", 128, _ANY, "dropout", (64, 32, 4, 2)),
        Row("sm_90", "16", 128, _ANY, "", (64, 64, 4, 3)),
        Row("", "", 128, _ANY, "dropout", (128, 64, 8, 2)),
        Row("", "", 128, _ANY, "", (128, 64, 8, 2)),
        Row("sm_90", "16", 256, _ANY, "heavy", (128, 32, 8, 2)),
        Row("sm_90", "16", 256, _ANY, "dropout", (128, 32, 8, 2)),
        Row("sm_90", "16", 256, _ANY, "", (128, 64, 8, 2)),
        Row("sm_100", "tf32", 256, _ANY, "dropout", (64, 32, 8, 1)),  # two stages spill 16 bytes
        Row("sm_90 sm_100", "", 256, _ANY, "", (64, 32, 8, 2)),
        Row("sm_86", "16", 256, _ANY, "narrow values, heavy", (64, 64, 8, 1)),
        Row("", "16", 256, _ANY, "narrow values", (128, 32, 8, 2)),
        Row("", "16", 256, _ANY, "heavy", (64, 64, 8, 1)),
        Row("", "16", 256, _ANY, "dropout", (32, 64, 8, 2)),
        Row("sm_86", "16", 256, _ANY, "", (64, 64, 8, 1)),
        Row("", "16", 256, _ANY, "", (64, 64, 8, 2)),
        Row("", "tf32", 256, _ANY, "heavy", (32, 64, 8, 1)),
        Row("", "tf32", 256, _ANY, "", (128, 32, 8, 2)),
    ),
    # dK and dV. 16 keys a warp, where they fit: with fewer, warps compute the same scores, if no branch spreads them
    # (`scores.score_gradient`).
    "keys": (
        Row("sm_90", "fp32", 64, _ANY, "", (32, 128, 8, 1)),
        Row("sm_90", "fp32", 128, _ANY, "", (32, 32, 4, 1)),
        Row("", "fp32", 32, _ANY, "", (32, 32, 4, 1)),
        Row("sm_100", "fp32", 64, _ANY, "heavy, bias", (16, 32, 8, 1)),
        Row("", "fp32", 64, _ANY, "heavy, bias", (16, 32, 4, 1)),
        Row("sm_80 sm_86", "fp32", 64, _ANY, "heavy", (16, 32, 4, 1)),
        Row("", "fp32", 64, _ANY, "", (32, 32, 4, 1)),
        Row("sm_100", "fp32", 128, _ANY, "heavy", (16, 32, 8, 1)),
        Row("", "fp32", 128, _ANY, "", (16, 32, 4, 1)),
        Row("sm_86", "fp32", 256, _ANY, "heavy", (16, 16, 8, 1)),
        Row("sm_86", "fp32", 256, _ANY, "dropout", (16, 16, 8, 1)),
        Row("sm_86", "fp32", 256, _ANY, "", (16, 16, 4, 1)),
        Row("sm_90", "fp32", 256, _ANY, "heavy", (16, 32, 8, 1)),
        Row("sm_90", "fp32", 256, _ANY, "", (16, 16, 8, 1)),
        Row("", "fp32", 256, _ANY, "", (16, 32, 8, 1)),
        Row("", "", 32, _ANY, "heavy", (32, 64, 4, 2)),
        Row("sm_90", "16", 32, _ANY, "", (64, 64, 4, 1)),
        Row("", "", 32, _ANY, "", (64, 64, 4, 2)),
        Row("sm_80 sm_86", "", 64, _ANY, "heavy", (16, 128, 8, 2)),
        Row("sm_80 sm_86", "", 64, _ANY, "", (32, 128, 8, 2)),
        Row("", "", 64, _ANY, "heavy", (32, 64, 4, 2)),
        Row("sm_100", "", 64, _ANY, "dropout", (64, 64, 8, 2)),
        Row("sm_90", "16", 64, _ANY, "", (32, 64, 4, 1)),
        Row("", "", 64, _ANY, "", (64, 128, 8, 2)),
        Row("sm_80 sm_86", "tf32", 128, _ANY, "", (32, 32, 4, 2)),
        Row("sm_80 sm_86", "", 128, _ANY, "heavy", (32, 32, 4, 2)),
        Row("sm_80 sm_86", "", 128, _ANY, "", (64, 64, 8, 2)),
        Row("sm_90", "", 128, _ANY, "heavy", (16, 128, 8, 2)),
        Row("sm_90", "16", 128, 511, "", (32, 64, 4, 2)),
        Row("sm_90", "16", 128, _ANY, "dropout", (32, 64, 4, 1)),
        Row("sm_90", "16", 128, _ANY, "", (64, 64, 4, 2)),
        Row("sm_90", "", 128, _ANY, "", (32, 128, 8, 2)),
        Row("", "", 128, _ANY, "", (32, 64, 8, 2)),
        Row("sm_86", "", 256, _ANY, "", (16, 32, 8, 2)),
        Row("sm_80", "tf32", 256, _ANY, "masked", (64, 32, 8, 2)),
        Row("", "tf32", 256, _ANY, "masked", (64, 16, 8, 2)),
        Row("sm_80", "tf32", 256, _ANY, "dropout", (64, 32, 8, 1)),
        Row("sm_80", "tf32", 256, _ANY, "", (32, 32, 4, 2)),
        Row("sm_100", "tf32", 256, _ANY, "heavy", (32, 64, 8, 1)),
        Row("", "tf32", 256, _ANY, "", (32, 64, 8, 2)),
        Row("sm_80", "16", 256, _ANY, "heavy", (64, 32, 8, 2)),
        Row("sm_80", "16", 256, _ANY, "dropout", (64, 16, 8, 2)),
        Row("sm_80", "16", 256, _ANY, "", (64, 32, 8, 2)),
        Row("", "16", 256, _ANY, "heavy", (64, 16, 8, 2)),
        Row("sm_90", "16", 256, _ANY, "dropout", (16, 64, 8, 1)),
        Row("sm_90", "16", 256, _ANY, "", (64, 64, 8, 1)),
        Row("", "16", 256, _ANY, "", (32, 64, 8, 2)),
    ),
    # dQ.
    "queries": (
        Row("sm_90", "fp32", 64, _ANY, "", (64, 64, 4, 1)),
        Row("sm_90", "fp32", 128, _ANY, "", (32, 32, 4, 1)),
        Row("sm_80 sm_86", "fp32", 64, _ANY, "heavy", (16, 16, 4, 1)),
        Row("", "fp32", 64, _ANY, "", (32, 32, 4, 1)),
        Row("", "fp32", 128, _ANY, "heavy", (16, 16, 4, 1)),
        Row("", "fp32", 128, _ANY, "", (16, 32, 4, 1)),
        Row("sm_90", "fp32", 256, _ANY, "", (16, 16, 4, 1)),
        Row("", "fp32", 256, _ANY, "", (16, 16, 8, 1)),
        Row("sm_100", "", 32, _ANY, "heavy, key mask", (64, 32, 8, 2)),
        Row("", "", 32, _ANY, "heavy", (64, 32, 4, 2)),
        Row("", "", 32, _ANY, "", (64, 64, 4, 2)),
        Row("sm_80 sm_86", "", 64, _ANY, "heavy, key mask", (128, 32, 8, 2)),
        Row("sm_90", "16", 64, _ANY, "heavy", (64, 64, 4, 2)),
        Row("", "", 64, _ANY, "heavy", (64, 32, 4, 2)),
        Row("sm_90", "16", 64, 511, "", (64, 32, 4, 3)),
        Row("", "", 64, 511, "", (64, 64, 4, 2)),
        Row("sm_90", "16", 64, _ANY, "dropout", (64, 32, 4, 3)),
        Row("", "", 64, _ANY, "dropout", (128, 64, 8, 2)),
        Row("sm_90", "16", 64, _ANY, "", (128, 64, 4, 3)),
        Row("", "", 64, _ANY, "", (128, 64, 8, 2)),
        Row("sm_80 sm_86", "", 128, _ANY, "heavy, key mask", (128, 16, 8, 2)),
        Row("sm_80 sm_86 sm_90", "tf32", 128, _ANY, "heavy", (128, 16, 8, 2)),
        Row("", "tf32", 128, _ANY, "heavy", (64, 32, 8, 2)),
        Row("", "", 128, _ANY, "heavy", (64, 32, 4, 2)),
        Row("sm_90", "16", 128, 511, "", (64, 64, 4, 2)),
        Row("sm_90", "16", 128, _ANY, "dropout", (64, 64, 4, 2)),
        Row("sm_90", "16", 128, _ANY, "", (128, 64, 8, 3)),
        Row("", "", 128, _ANY, "dropout", (64, 32, 4, 2)),
        Row("sm_80 sm_86", "tf32", 128, _ANY, "", (64, 32, 4, 2)),
        Row("", "", 128, _ANY, "", (64, 64, 4, 2)),
        Row("sm_100", "", 256, _ANY, "heavy", (64, 32, 8, 2)),
        Row("sm_100", "", 256, _ANY, "dropout", (64, 32, 8, 1)),
        Row("sm_100", "", 256, _ANY, "", (64, 32, 8, 2)),
        Row("sm_90", "tf32", 256, _ANY, "", (128, 16, 8, 2)),
        Row("sm_90", "", 256, _ANY, "heavy", (128, 16, 8, 2)),
        Row("sm_90", "16", 256, _ANY, "dropout", (128, 32, 8, 2)),
        Row("sm_90", "", 256, _ANY, "", (128, 32, 8, 3)),
        Row("sm_86", "", 256, _ANY, "", (32, 32, 4, 2)),
        Row("", "", 256, _ANY, "heavy", (32, 32, 4, 2)),
        Row("", "tf32", 256, _ANY, "", (128, 16, 8, 2)),
        Row("", "", 256, _ANY, "", (64, 32, 8, 2)),
    ),
    # Kernels of a single tile of scores: weights, and the gradient of a mask. On matrix units, 4 warps share 64 rows.
    # Triton treats two products in one formula like a product that feeds another, and lays all warps along the rows: 8
    # warps then computed 32 rows four times.
    "scores": (
        Row("gfx9 gfx12", "fp32", 128, _ANY, "", (32, 32, 8, 1)),
        Row("gfx9 gfx12", "16", 256, _ANY, "", (64, 16, 4, 1)),  # two stages take 80 KiB of LDS
        Row("sm_86", "fp32", 64, _ANY, "", (32, 32, 8, 1)),
        Row("sm_86", "fp32", 128, _ANY, "", (32, 32, 8, 2)),
        Row("", "fp32", 128, _ANY, "", (32, 32, 8, 1)),
        Row("", "fp32", 256, _ANY, "", (16, 16, 8, 1)),
        Row("sm_80 sm_86", "", 64, _ANY, "", (64, 32, 4, 1)),
        Row("sm_80 sm_86", "", 128, _ANY, "", (64, 16, 4, 2)),
        Row("sm_86", "tf32", 256, _ANY, "", (32, 16, 4, 2)),  # 64 rows of 4 warps spill 144 bytes
        Row("sm_80", "tf32", 256, _ANY, "", (128, 16, 8, 2)),
        Row("sm_80 sm_86", "", 256, _ANY, "", (64, 16, 4, 2)),
        Row("sm_90", "", 256, _ANY, "", (64, 64, 8, 1)),
        Row("", "", 128, _ANY, "", (64, 64, 8, 1)),
        Row("", "", 256, _ANY, "", (64, 16, 8, 1)),
    ),
    # The gradient of a bias by distance: the tiles of scores, except for one that spilled 8 bytes.
    "bias": (Row("sm_100", "fp32", 128, _ANY, "", (32, 16, 8, 1)),),
    # Keys a tile.
    "decode": (
        Row("", "fp32", 32, _ANY, "", (32, 4, 2)),
        Row("", "fp32", 64, _ANY, "", (32, 8, 2)),
        Row("", "fp32", 256, _ANY, "", (32, 8, 1)),
        Row("sm_90", "16", 64, _ANY, "", (64, 4, 3)),
        Row("", "", 128, _ANY, "", (64, 4, 2)),
        Row("sm_100", "tf32", 256, _ANY, "bias", (16, 2, 2)),  # 32 keys and 4 warps spill 8 bytes
        Row("sm_100", "", 256, _ANY, "bias", (16, 2, 1)),
        Row("", "tf32", 256, _ANY, "", (32, 4, 2)),
        Row("", "", 256, _ANY, "", (32, 4, 1)),
    ),
}
TILES["bias"] += TILES["scores"]


@cache
def measured() -> dict[str, dict[str, int]]:
    """Read the tiles that tuning wrote, by `Call.key`."""
    tiles: dict[str, dict[str, int]] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return tiles


@cache
def choose(call: Call) -> dict[str, int]:
    """Return the tile sizes of a call by name; callers must not modify the dictionary."""
    if call.key in measured():
        return measured()[call.key]
    row = next(row for row in TILES[call.family] if row.fits(call))
    return dict(zip(_NAMES.get(call.family, BLOCKS), row.tile, strict=True))
