"""Processes against a deadline, for the steps of `benchmarks.lane` and the seeds of `benchmarks.recipes`.

Each runs in a session of its own. When its time is up it is interrupted, so that it says what it has found, and after a
grace killed. However a process ends, and however this program does, nothing that it started outlives it.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
_POLL = 0.1


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


@dataclass
class _Running:
    process: "subprocess.Popen[bytes]"
    begin: float
    limit: float
    cut: bool = False

    def state(self) -> str:
        if self.cut:
            return f"cut after {self.limit:.0f} s"
        code = self.process.returncode
        return "done" if code == 0 else f"failed, exit code {code}"

    def send(self, number: signal.Signals) -> None:
        """To it and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Processes:
    """Those that run; leaving the block kills them."""

    def __init__(
        self, log: Path, grace: float, *, variables: dict[str, str] | None = None, folder: Path | None = None
    ) -> None:
        """See the class.

        Args:
            log: takes what they print.
            grace: seconds between asking one to end and killing it.
            variables: of their environment; unset: `environment()`.
            folder: where they run; unset: here.
        """
        self.running: dict[Command, _Running] = {}
        self._log, self._grace, self._folder = log, grace, folder
        self._variables = environment() if variables is None else variables

    def __enter__(self) -> "Processes":
        self._output: BinaryIO = self._log.open("ab")
        return self

    def __exit__(self, *error: object) -> None:
        for command in [*self.running]:
            self._end(command)
        self._output.close()

    def start(self, command: Command, limit: float) -> int:
        """Run a command for so many seconds at most, and the grace; where in the log its output begins."""
        head = f"\n===== {command.name}, {limit:.0f} s at most: {' '.join(command.arguments)}\n"
        self._output.write(head.encode())
        self._output.flush()
        begin = self._output.tell()
        process = subprocess.Popen(
            command.arguments, cwd=self._folder, env=self._variables, stdin=subprocess.DEVNULL, stdout=self._output,
            stderr=self._output, start_new_session=True,
        )  # fmt: skip
        self.running[command] = _Running(process, time.monotonic(), limit)
        return begin

    def wait(self) -> list[Outcome]:
        """Wait a moment, and give back what became of those that have ended."""
        time.sleep(_POLL)
        return [self._end(command) for command, each in [*self.running.items()] if self._is_over(each)]

    def _is_over(self, each: _Running) -> bool:
        if each.process.poll() is not None:
            return True
        late = time.monotonic() - each.begin - each.limit
        if late >= 0 and not each.cut:
            each.cut = True
            each.send(signal.SIGINT)
        return late >= self._grace

    def _end(self, command: Command) -> Outcome:
        each = self.running[command]
        each.send(signal.SIGKILL)  # what it has left running, too
        each.process.wait()
        del self.running[command]
        return Outcome(command.name, each.state(), time.monotonic() - each.begin)


def environment(**more: str) -> dict[str, str]:
    """The children's: our packages are found where they are, and nothing waits by spinning.

    Args:
        more: further variables.
    """
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    return given | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | more


def exit_when_terminated() -> None:
    """Let SIGTERM leave the blocks of this program, which kills its processes."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
