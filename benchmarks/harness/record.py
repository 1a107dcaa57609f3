"""Rows of the tables, and the files that runs write: one line of JSON a row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict

FORMAT = 1  # of records and results; raised when fields of a row change


class Row(BaseModel):
    """A case against a competitor. Times are seconds a call, medians over rounds; pairs are (fastformer, competitor).

    `theirs` is None if the competitor was not timed; `status` gives the reason. `ratio`, `wall` and `graph` are the
    competitor's time over fastformer's: by the clock of the device, by the wall clock, and of CUDA graphs. The device's
    clock also counts time in which the device waits for the host; a CUDA graph never waits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    benchmark: str
    case: str
    against: str
    status: str  # measured, dry run, or why the competitor was not timed
    ours: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    goal: float | None = None
    rounds: int = 0
    tokens: tuple[int, int] = (1, 1)
    matmul_rate: float | None = None  # of a matrix product beside the case, operations a second
    wall: float | None = None
    graph: float | None = None
    floor: float | None = None  # the least time of the hardware (`benchmarks.harness.clock`) over the time
    operations_per_second: float | None = None
    bytes_per_second: float | None = None
    peak_bytes: tuple[int, int] | None = None
    saved_bytes: tuple[int, int] | None = None
    peak_goal: float | None = None  # of fastformer's bytes over the competitor's, at most
    saved_goal: float | None = None
    notes: Mapping[str, Any] = {}
    commit: str | None = None  # of the measured code, where it is not that of the result

    @property
    def compared(self) -> float | None:
        """The ratio that counts for goals and means: that of CUDA graphs, where there is one."""
        return self.ratio if self.graph is None else self.graph

    @property
    def missed(self) -> bool:
        """Whether the ratio is below its goal."""
        return self.goal is not None and self.compared is not None and self.compared < self.goal

    @property
    def key(self) -> tuple[str, str, str]:
        return self.benchmark, self.case, self.against


class Record:
    """The rows of a run. With a file, each row is written as soon as it exists."""

    def __init__(self, machine: Mapping[str, str], path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path is not None else None
        self._write({"format": FORMAT, "machine": dict(machine)})

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        self._write({"row": row.model_dump()})

    def close(self, ceilings: Mapping[str, float]) -> None:
        """Write the measured ceilings of the machine, and close the file."""
        self._write({"ceilings": dict(ceilings)})
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
