"""What a run of the benchmarks writes down: rows of the tables, one line of JSON each, and what the machine is."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

FORMAT = 1  # of records and results; raised when their fields change


@dataclass(frozen=True)
class Row:
    """A line of the tables. Times in seconds a call, the median over rounds; `theirs` is None where `status` says why.

    `wall` and `graph` are ratios too: by the clock on the wall, and of CUDA graphs' replays. `floor` is the share that
    the floor of `benchmarks.harness.floors` has of our time. `at` places the case on the axes of the scaling plots.
    """

    benchmark: str
    case: str
    against: str
    status: str  # measured, dry run, or what kept the competitor from being timed
    ours: float | None
    theirs: float | None
    ratio: float | None
    goal: float | None
    rounds: int
    tokens: tuple[int, int]
    matmul_rate: float
    wall: float | None = None
    graph: float | None = None
    floor: float | None = None
    operations_per_second: float | None = None
    bytes_per_second: float | None = None
    peak_bytes: tuple[int, int] | None = None
    saved_bytes: tuple[int, int] | None = None
    peak_goal: float | None = None  # of ours / theirs, at most
    saved_goal: float | None = None
    at: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        """A goal was set, and the ratio is below it."""
        return self.goal is not None and self.ratio is not None and self.ratio < self.goal


class Record:
    """All rows of a run; with a file, each is written the moment it exists, so that a run cut short keeps them."""

    def __init__(self, machine: Mapping[str, str], path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path is not None else None
        self._write({"format": FORMAT, "machine": dict(machine)})

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)
        self._write({"row": asdict(row)})

    def close(self, ceilings: Mapping[str, float]) -> None:
        """Write the ceilings that were measured, and end."""
        self._write({"ceilings": dict(ceilings)})
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
