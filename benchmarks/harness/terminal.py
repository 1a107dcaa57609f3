"""The table that a run of the benchmarks ends with, one line a case."""

from collections.abc import Iterator, Sequence

from benchmarks.harness.record import Row


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The head, then ours, theirs, their ratio, goal and floor, and the memory of both, of each row."""
    width, other = max(len(row.case) for row in rows), max(len(row.against) for row in rows)
    memory = max(len(name) for name in ("memory, ours / theirs", *map(_memory, rows)))
    head = f"{'ours':>14}  {'theirs':>14}  {'ratio':>6}  {'goal':>6}  {'floor':>5}  {'memory, ours / theirs':>{memory}}"
    yield f"{'case':<{width}}  {'against':<{other}}  {head}"
    for row in rows:
        ours, theirs = _speed(row.ours, row.tokens[0]), _speed(row.theirs, row.tokens[1])
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"{row.goal:g}"
        floor = "" if row.floor is None else f"{100 * row.floor:.0f} %"
        tail = "  missed" if row.missed else "" if row.status in ("measured", "dry run") else f"  {row.status}"
        values = f"{ours:>14}  {theirs:>14}  {ratio:>6}  {goal:>6}  {floor:>5}  {_memory(row):>{memory}}{tail}"
        yield f"{row.case:<{width}}  {row.against:<{other}}  {values}".rstrip()


def _speed(seconds: float | None, tokens: int) -> str:
    if seconds is None:
        return "-"
    if tokens > 1:
        return f"{tokens / seconds:,.{0 if tokens / seconds >= 100 else 1}f} tokens/s"
    return f"{seconds * 1e3:,.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def _memory(row: Row) -> str:
    """The peak of a call where it is known (on a GPU), else what is kept for backward; "" of what has none."""
    kind, pair = ("peak", row.peak_bytes) if row.peak_bytes is not None else ("saved", row.saved_bytes)
    return "" if pair is None else f"{kind} {_megabytes(pair[0])} / {_megabytes(pair[1])} MB"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.{1 if size < 100e6 else 0}f}"
