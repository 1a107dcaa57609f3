"""Rows of the tables, the files that runs write, one line of JSON a row, and the committed results made of them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.harness.environment import DIRTY, checked

_DIGITS = 5  # significant ones that are kept
_Model = TypeVar("_Model", bound=BaseModel)
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
FORMAT = 1  # of records and results; raised when fields of a row change


class Row(BaseModel):
    """A case against a competitor. Times are seconds a call, medians over rounds.

    `theirs` is None where the competitor was not timed, and `status` says why. `ratio`, `wall` and `graph` are the
    competitor's time over fastformer's: by the clock of the device, by the wall clock, and of CUDA graphs. `floor` is
    the share of the time that the hardware needs at least (`benchmarks.harness.clock`). Pairs are (fastformer,
    competitor).
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
    floor: float | None = None
    operations_per_second: float | None = None
    bytes_per_second: float | None = None
    peak_bytes: tuple[int, int] | None = None
    saved_bytes: tuple[int, int] | None = None
    peak_goal: float | None = None  # of fastformer's bytes over the competitor's, at most
    saved_goal: float | None = None
    notes: Mapping[str, Any] = {}

    @property
    def missed(self) -> bool:
        """Whether the ratio is below its goal."""
        return self.goal is not None and self.ratio is not None and self.ratio < self.goal

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


class CommittedResult(BaseModel):
    """The rows of one machine and commit, without notes. `matmul` is the range of the rows' `matmul_rate`."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(exclude=True)
    format: int
    machine: Mapping[str, str]  # as in `benchmarks.harness.environment.facts`
    timer: str
    ceilings: Mapping[str, float]  # operations or bytes a second
    matmul: tuple[float, float] | None  # operations a second of a matrix product, the lowest and highest beside a case
    complete: bool  # no run was cut
    rows: tuple[Row, ...]

    @staticmethod
    def load(path: Path) -> "CommittedResult":
        """Read a committed result.

        Raises:
            ValueError: the file is of another format, or no result.
        """

        def parse() -> CommittedResult:
            return CommittedResult(name=path.stem, **_of_this_format(json.loads(path.read_text(encoding="utf-8"))))

        return _validated(path, parse)

    def save(self, folder: Path) -> Path:
        """Write the result as NAME.json, one line a row."""
        head = json.dumps(self.model_dump(exclude={"rows"}), indent=1)[:-2]
        rows = ",\n".join("  " + json.dumps(_dense(row)) for row in self.rows)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
        return path

    def by_benchmark(self) -> dict[str, list[Row]]:
        """Return the rows of each benchmark, in their order."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.benchmark, []).append(row)
        return groups


class Run(BaseModel):
    """A recorded run. If a case was measured twice, the later row counts."""

    machine: dict[str, str]
    rows: dict[tuple[str, str, str], Row]
    ceilings: dict[str, float]
    complete: bool

    @staticmethod
    def read(path: Path) -> "Run":
        """Read a run, also one that was cut before its last line.

        Raises:
            ValueError: the file is no run, or of another format.
        """
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines[1:] and not lines[-1].endswith("}"):
            lines.pop()  # cut while it was written

        def parse() -> Run:
            entries = [json.loads(line) for line in lines] or [{}]
            rows = [Row(**entry["row"]) for entry in entries if "row" in entry]
            ceilings = [entry["ceilings"] for entry in entries if "ceilings" in entry]
            return Run(
                machine=_of_this_format(entries[0])["machine"],
                rows={row.key: row for row in rows},
                ceilings={name: rate for each in ceilings for name, rate in each.items()},
                complete=bool(ceilings),
            )

        return _validated(path, parse)


def _of_this_format(head: Any) -> dict[str, Any]:
    version = head.get("format") if isinstance(head, dict) else None
    if version != FORMAT:
        raise ValueError(f"has format {version}, this version reads format {FORMAT}: measure again")
    return dict(head)


def _validated(path: Path, read: Callable[[], _Model]) -> _Model:
    try:
        return read()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is no result of the benchmarks: {place}: {first['msg']}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of the benchmarks: {error}") from None


def merge(paths: Sequence[Path]) -> Run:
    """Merge runs of the same code on the same machine; of a case measured twice, the row of the later file counts.

    Raises:
        ValueError: a file is no run, or two of them differ in a fact that figures depend on.
    """
    runs = [Run.read(path) for path in paths]
    first = runs[0].machine
    for path, run in zip(paths, runs, strict=True):
        for key in sorted({*first, *run.machine} - {"date"}):
            if first.get(key) != run.machine.get(key):
                raise ValueError(
                    f"{paths[0]} and {path} differ in {key}: {first.get(key)!r} and {run.machine.get(key)!r}; a result "
                    "is of one machine and one commit"
                )
    rows = {key: row for run in runs for key, row in run.rows.items()}
    ceilings = {key: rate for run in runs for key, rate in run.ceilings.items()}
    return Run(machine=runs[-1].machine, rows=rows, ceilings=ceilings, complete=all(run.complete for run in runs))


def condense(paths: Sequence[Path], name: str) -> CommittedResult:
    """Return what is committed of one or several runs.

    Raises:
        ValueError: an invalid name; or runs that differ in machine or code, are of uncommitted code, are dry runs, or
            have no measurement.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"NAME is {name!r}; allowed are small letters and digits in words joined by -")
    run = merge(paths)
    rows = [*run.rows.values()]
    files = ", ".join(map(str, paths))
    commit = checked(run.machine.get("commit", ""), files)
    if any(row.status == "dry run" for row in rows):
        raise ValueError(f"{files}: this is a dry run, which measures nothing")
    if not any(row.ours is not None for row in rows):
        raise ValueError(f"{files}: there is no measurement")
    if commit.endswith(DIRTY):
        raise ValueError(f"{files}: uncommitted code was measured ({commit}); commit, then measure again")
    rates = [rounded(row.matmul_rate) for row in rows if row.matmul_rate is not None]
    return CommittedResult(
        name=name,
        format=FORMAT,
        machine=run.machine,
        timer=next(row.notes["timer"] for row in rows if "timer" in row.notes),
        ceilings={key: rounded(rate) for key, rate in run.ceilings.items()},
        matmul=(min(rates), max(rates)) if rates else None,
        complete=run.complete,
        rows=tuple(row.model_copy(update={"matmul_rate": None, "notes": {}}) for row in rows),
    )


def _dense(row: Row) -> dict[str, Any]:
    fields = row.model_dump(exclude_defaults=True).items()
    return {name: rounded(value) if isinstance(value, float) else value for name, value in fields}


def rounded(value: float) -> float:
    """Round to the digits that are kept, so that machines that differ in the last bit agree."""
    return float(f"{value:.{_DIGITS}g}")
