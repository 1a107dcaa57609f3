"""One step of `benchmarks.lane`: its command, ended at its limit with all it started, and the rows it records."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
GRACE = 5.0  # seconds between asking a step to end and killing it
_POLL = 0.1
_NOTHING_CHOSEN = 5  # pytest's exit code where no test was left
_COUNTS = re.compile(rb"\d+ (?:failed|errors?|passed|skipped)\b")  # of pytest's last line


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that are kept for it."""

    name: str
    command: tuple[str, ...]
    seconds: float
    proves: bool = False  # it fails only if ours is wrong
    needs: tuple[str, ...] = ()  # modules

    @property
    def records(self) -> bool:
        """It is a benchmark."""
        return "--record" in self.command

    @property
    def is_test(self) -> bool:
        """It proves, and measures nothing."""
        return self.proves and not self.records


@dataclass
class Outcome:
    """How a step ended."""

    name: str
    state: str
    seconds: float = 0.0
    wrong: bool = False

    @property
    def ended(self) -> bool:
        """By itself, right or wrong."""
        return self.state.startswith(("done", "failed", "nothing to run"))


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


def run_step(step: Step, limit: float, log: TextIO, environment: Mapping[str, str], gathered: Gathered) -> Outcome:
    """Run a command for so many seconds at most; then it is interrupted, and killed with all that it started."""
    log.write(f"\n===== {step.name}, {limit:.0f} s at most: {' '.join(step.command)}\n")
    log.flush()
    start = Path(log.name).stat().st_size
    gathered.start()
    begin = time.monotonic()
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=dict(environment), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        while process.poll() is None and time.monotonic() - begin < limit:
            time.sleep(_POLL)
            gathered.collect()
        cut = process.poll() is None
        if cut:
            _end(process)
    finally:
        _kill(process)  # what it left running, and itself where this program is ended
        gathered.collect()
    seconds = time.monotonic() - begin
    counts = _counts(Path(log.name), start) if step.proves else ""
    if cut:
        state = f"cut after {limit:.0f} s"
    elif step.proves and process.returncode == _NOTHING_CHOSEN:
        return Outcome(step.name, "nothing to run", seconds)
    else:
        state = "done" if process.returncode == 0 else f"failed, exit code {process.returncode}"
    wrong = step.proves and (state.startswith("failed") or "failed" in counts or "error" in counts)
    return Outcome(step.name, f"{state}{': ' * bool(counts)}{counts}", seconds, wrong)


def _counts(log: Path, start: int) -> str:
    """What pytest says in its last line; "" if it did not come to that."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().splitlines() if _COUNTS.search(line) and b" in " in line]
    return ", ".join(match.decode() for match in _COUNTS.findall(lines[-1])) if lines else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt it, so that pytest says what it has found so far."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
