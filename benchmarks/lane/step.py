"""One step of `benchmarks.lane`: its process, the rows it records, and what its end says."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.harness.processes import POLL, ROOT, Command, Outcome, Process

GRACE = 5.0  # seconds between asking a step to end and killing it
_NOTHING_CHOSEN = "failed, exit code 5"  # pytest's where no test was left
_COUNTS = re.compile(rb"\d+ (?:failed|errors?|passed|skipped)\b")  # of pytest's last line


@dataclass(frozen=True)
class LaneStep(Command):
    """A command of the plan."""

    proves: bool = False  # it fails only if ours is wrong
    needs: tuple[str, ...] = ()  # modules

    @property
    def records(self) -> bool:
        """It is a benchmark."""
        return "--record" in self.arguments

    @property
    def is_test(self) -> bool:
        """It proves, and measures nothing."""
        return self.proves and not self.records


@dataclass
class Gathered:
    """The rows of all benchmark steps in one file, each written there while its step runs."""

    path: Path
    part: Path
    ceilings: dict[str, float] = field(default_factory=dict)
    _read: int = 0
    _begun: bool = False

    def start(self) -> None:
        """Before a step."""
        self.part.unlink(missing_ok=True)
        self._read = 0

    def collect(self) -> None:
        """Take over the whole lines that are new."""
        if not self.part.is_file():
            return
        with self.part.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            entry = json.loads(line)
            if "ceilings" in entry:
                self.ceilings = entry["ceilings"] | self.ceilings
            elif "row" in entry or not self._begun:
                self._write(line)
                self._begun = True

    def finish(self, cut: Sequence[str]) -> None:
        """After all steps: the ceilings, and which steps did not end."""
        if self._begun:
            self._write(json.dumps({"ceilings": self.ceilings, "cut": list(cut)}))

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def run_step(step: LaneStep, limit: float, log: Path, variables: dict[str, str], gathered: Gathered) -> Outcome:
    """Run a step for so many seconds at most, and gather its rows meanwhile."""
    gathered.start()
    process = Process(step, limit, GRACE, log, variables, ROOT)
    try:
        while (outcome := process.poll()) is None:
            time.sleep(POLL)
            gathered.collect()
    finally:
        process.end()
        gathered.collect()
    return _judged(outcome, _counts(log, process.output)) if step.proves else outcome


def _judged(outcome: Outcome, counts: str) -> Outcome:
    """What proves ours right or wrong, with what pytest has counted."""
    if outcome.state == _NOTHING_CHOSEN:
        return replace(outcome, state="nothing to run")
    wrong = outcome.state.startswith("failed") or "failed" in counts or "error" in counts
    return replace(outcome, state=f"{outcome.state}{': ' * bool(counts)}{counts}", wrong=wrong)


def _counts(log: Path, begin: int) -> str:
    """What pytest says in its last line; "" if it did not come to that."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line for line in file.read().splitlines() if _COUNTS.search(line) and b" in " in line]
    return ", ".join(match.decode() for match in _COUNTS.findall(lines[-1])) if lines else ""
