"""Processes against a deadline, for the steps of `benchmarks.lane` and the trainings of `benchmarks.recipes`.

When its time is up a process is interrupted, so that it says what it has found, and after a grace killed. However it
ends, nothing that it started outlives it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.1  # seconds between two looks at a process


@dataclass(frozen=True)
class Command:
    """What a process runs, its name in messages, and the seconds that are kept for it."""

    name: str
    arguments: tuple[str, ...]
    seconds: float = 0.0
    alone: bool = False  # nothing else runs beside it


@dataclass(frozen=True)
class Outcome:
    """What became of a command: done, failed, cut or left out; in `state` also why."""

    name: str
    state: str
    seconds: float = 0.0
    wrong: bool = False  # it shows that ours is

    @property
    def ended(self) -> bool:
        """By itself, right or wrong."""
        return not self.state.startswith(("cut", "left out"))

    def __str__(self) -> str:
        return f"{self.name}: {self.state}, {self.seconds:.0f} s"


class Process:
    """A command that runs for so many seconds at most, and the grace. Whoever starts it ends it, come what may."""

    def __init__(
        self, command: Command, limit: float, grace: float, log: Path, env: dict[str, str], folder: Path | None = None
    ) -> None:
        """Start it, in a session of its own; what it prints goes into the log, from `output` on."""
        self.command, self.limit, self.grace, self.cut = command, limit, grace, False
        with log.open("ab") as file:
            file.write(f"\n===== {command.name}, {limit:.0f} s at most: {' '.join(command.arguments)}\n".encode())
            file.flush()
            self.output = file.tell()
            self._process = subprocess.Popen(
                command.arguments, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self._begin = time.monotonic()

    def poll(self) -> Outcome | None:
        """None while it runs."""
        late = time.monotonic() - self._begin - self.limit
        if self._process.poll() is not None or late >= self.grace:
            return self.end()
        if late >= 0 and not self.cut:
            self.cut = True
            self._send(signal.SIGINT)
        return None

    def end(self) -> Outcome:
        """Kill it, where it still runs, and what it has left running."""
        self._send(signal.SIGKILL)
        code = self._process.wait()
        state = f"cut after {self.limit:.0f} s" if self.cut else f"failed, exit code {code}" if code else "done"
        return Outcome(self.command.name, state, time.monotonic() - self._begin)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def variables(**more: str) -> dict[str, str]:
    """The children's: our packages are found where they are, and nothing waits by spinning."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    return given | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | more


def exit_when_terminated() -> None:
    """Let SIGTERM end this program as an error does, on the way of which its processes are ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
