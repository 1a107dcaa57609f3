"""Runs as `pytest benchmarks --record` writes them, and results as they are committed: what a reader needs of a run."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import DIRTY, checked
from benchmarks.harness.record import FORMAT, Row

_DIGITS = 5  # significant ones that are kept
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FIELDS = {field.name: field for field in fields(Row)}
_LISTS = ("tokens", "peak_bytes", "saved_bytes")  # JSON has no tuples


@dataclass(frozen=True)
class CommittedResult:
    """A run on one machine. Its rows hold no `notes` and no `matmul_rate`, the range of which is in `matmul`."""

    name: str
    machine: Mapping[str, str]  # as in `benchmarks.harness.environment.facts`
    timer: str
    ceilings: Mapping[str, float]  # operations or bytes a second
    matmul: tuple[float, float] | None  # operations a second of a matrix product, the least and the most by the cases
    complete: bool  # the run came to its end
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class RecordedRun:
    """What a run has recorded; of a case measured twice the later row."""

    machine: Mapping[str, str]
    rows: tuple[Row, ...]
    ceilings: Mapping[str, float]
    complete: bool


def read_run(path: Path) -> RecordedRun:
    """Read a run, also one that was cut before its last line.

    Raises:
        ValueError: the file is no run, or one of another version.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            if 1 < number == len(lines):
                break  # cut while it was written
            raise ValueError(
                f"{path}: line {number} is no JSON; runs are what `pytest benchmarks --record` writes"
            ) from None
    if not entries:
        raise ValueError(f"{path} is empty; a run has at least the line that names the machine")
    _check_format(entries[0], path)
    rows: dict[tuple[str, str, str], Row] = {}
    ceilings: dict[str, float] = {}
    complete = False
    for entry in entries[1:]:
        if "row" in entry:
            row = _row(entry["row"], path)
            rows[_key(row)] = row
        elif "ceilings" in entry:
            ceilings |= entry["ceilings"]
            complete = not entry.get("cut")  # the steps of benchmarks.lane that did not end
    return RecordedRun(entries[0]["machine"], tuple(rows.values()), ceilings, complete)


def merge(paths: Sequence[Path]) -> RecordedRun:
    """Runs of the same code on the same machine as one; of a case measured twice the row of the later file.

    Raises:
        ValueError: a file is no run, or two of them differ in something that figures depend on.
    """
    found = [read_run(path) for path in paths]
    first = found[0].machine
    for path, run in zip(paths, found, strict=True):
        for key in sorted({*first, *run.machine} - {"date"}):
            here, there = first.get(key), run.machine.get(key)
            if here != there:
                raise ValueError(
                    f"{paths[0]} and {path} differ in {key}: {here!r} and {there!r}; a result is of one of both"
                )
    rows = {_key(row): row for run in found for row in run.rows}
    ceilings = {key: rate for run in found for key, rate in run.ceilings.items()}
    return RecordedRun(found[-1].machine, tuple(rows.values()), ceilings, all(run.complete for run in found))


def condense(paths: Sequence[Path], name: str) -> CommittedResult:
    """What of one or several runs is committed.

    Raises:
        ValueError: a name that makes no file name, runs that do not belong together, of uncommitted or unknown code,
            dry ones, or without measurements.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"NAME is {name!r}; allowed are small letters and digits in words joined by -, as in h200-full"
        )
    run = merge(paths)
    rows = run.rows
    said = ", ".join(map(str, paths))
    commit = checked(run.machine.get("commit", ""), said)
    if any(row.status == "dry run" for row in rows):
        raise ValueError(f"{said}: a dry run, no figure of which means anything")
    if not any(row.ours is not None for row in rows):
        raise ValueError(f"{said}: there is no measurement")
    if commit.endswith(DIRTY):
        raise ValueError(f"{said}: uncommitted code was measured ({commit}); commit, then measure again")
    rates = [row.matmul_rate for row in rows if not math.isnan(row.matmul_rate)]
    return CommittedResult(
        name,
        run.machine,
        timer=next(str(row.notes["timer"]) for row in rows if "timer" in row.notes),
        ceilings={key: rounded(rate) for key, rate in run.ceilings.items()},
        matmul=(rounded(min(rates)), rounded(max(rates))) if rates else None,
        complete=run.complete,
        rows=tuple(_condensed(row) for row in rows),
    )


def save(result: CommittedResult, folder: Path) -> Path:
    """Write a result as NAME.json, a row a line."""
    head = {"format": FORMAT} | {key: value for key, value in asdict(result).items() if key not in ("name", "rows")}
    body = json.dumps(head, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(_dense(row)) for row in result.rows)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(f'{body},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
    return path


def load(path: Path) -> CommittedResult:
    """Read a committed result.

    Raises:
        ValueError: it is of another version, or no result.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    _check_format(data, path)
    try:
        return CommittedResult(
            path.stem,
            data["machine"],
            data["timer"],
            data["ceilings"],
            tuple(data["matmul"]) if data["matmul"] else None,
            data["complete"],
            tuple(_row(row, path) for row in data["rows"]),
        )
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from None


def _key(row: Row) -> tuple[str, str, str]:
    return row.benchmark, row.case, row.against


def _check_format(head: object, path: Path) -> None:
    found = head.get("format") if isinstance(head, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, and this version reads format {FORMAT}: measure again")
    if not isinstance(head, dict) or "machine" not in head:
        raise ValueError(f"{path} names no machine")


def _row(entry: Mapping[str, Any], path: Path) -> Row:
    given: dict[str, Any] = {"matmul_rate": math.nan, "tokens": (1, 1)} | dict(entry)
    unknown = sorted(given.keys() - _FIELDS.keys())
    if unknown:
        raise ValueError(f"{path}: a row has the unknown field {unknown[0]!r}")
    for name, field in _FIELDS.items():
        if name not in given and field.default is MISSING and field.default_factory is MISSING:
            if "None" not in str(field.type):
                raise ValueError(f"{path}: a row has no {name!r}")
            given[name] = None
    given |= {name: tuple(given[name]) for name in _LISTS if given.get(name) is not None}
    return Row(**given)


def _condensed(row: Row) -> Row:
    """Without notes, except that what a model saves for backward stands there."""
    saved = row.notes.get("saved_for_backward_bytes")
    if row.saved_bytes is None and saved is not None:
        row = replace(row, saved_bytes=(saved["ours"], saved["theirs"]))
    return replace(row, matmul_rate=math.nan, notes={})


def _dense(row: Row) -> dict[str, Any]:
    """The fields that say something."""
    given = {name: value for name, value in asdict(row).items() if value not in (None, {}, (1, 1))}
    del given["matmul_rate"]
    return {name: rounded(value) if isinstance(value, float) else value for name, value in given.items()}


def rounded(value: float) -> float:
    """To the digits that are kept, by which machines that differ in the last bit agree."""
    return float(f"{value:.{_DIGITS}g}")


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by benchmark, in their order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.benchmark, []).append(row)
    return groups
