"""Two processes that write to one folder, which take turns at every file that they open, replace, make or remove.

Each command runs in a forked child whose calls of the system wait for their turn. Who goes on, and whether one is
killed, is drawn; so every order of their calls can come, and comes again with its number.
"""

import contextlib
import gc
import io
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch

from tests.fuzz.fuzz_commands import cheapen
from tests.support.command_line import Done, fastformer

CALLS = ("open", "replace", "rename", "unlink", "mkdir", "rmdir", "ftruncate", "stat", "listdir")


@dataclass
class Writer:
    """A command in a process of its own, which stands before its next call."""

    pid: int
    turns: int  # writing a byte here lets it go on
    words: int  # it says "." before each call, then how it ended
    done: Done | None = None
    calls: int = 0

    @classmethod
    def start(cls, line: str, home: Path) -> "Writer":
        """Fork; the child waits before its first call."""
        (taken, turns), (words, said) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(turns)
                os.close(words)
                gc.disable()  # it would copy what the parent has
                cheapen(pytest.MonkeyPatch())
                _take_turns(taken, said)
                with contextlib.redirect_stdout(io.StringIO()):
                    done = fastformer(*line.split(), cwd=home)
                os.write(said, b"#" + json.dumps([done.returncode, done.stdout, done.stderr]).encode())
                code = 0
            except BaseException as error:
                os.write(said, b"#" + json.dumps([1, "", f"{type(error).__name__}: {error}"]).encode())
            finally:
                os._exit(code)
        os.close(taken)
        os.close(said)
        writer = cls(pid, turns, words)
        writer._listen()
        return writer

    def go_on(self) -> None:
        """Up to its next call, or its end."""
        self.calls += 1
        with contextlib.suppress(BrokenPipeError):  # a signal has ended it
            os.write(self.turns, b".")
        self._listen()

    def to_its_end(self) -> Done:
        """Alone from now on."""
        while self.done is None:
            self.go_on()
        return self.done

    def _listen(self) -> None:
        begun = os.read(self.words, 1)
        if begun == b".":
            return
        said = b"".join(iter(lambda: os.read(self.words, 1 << 16), b""))
        self._end(Done(*json.loads(said)) if begun else None)

    def kill(self) -> None:
        """As power or the system would."""
        if self.done is None:
            os.kill(self.pid, signal.SIGKILL)
            self._end(None)

    def _end(self, done: Done | None) -> None:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.turns)
        os.close(self.words)
        self.done = done or Done(os.waitstatus_to_exitcode(status), "", "")


def _take_turns(taken: int, said: int) -> None:
    """Have calls of the system that change folders wait."""

    def waiting(call: Any) -> Any:
        def wait(*arguments: Any, **more: Any) -> Any:
            os.write(said, b".")
            if not os.read(taken, 1):
                os._exit(1)  # nobody is there any more
            return call(*arguments, **more)

        return wait

    for name in CALLS:
        setattr(os, name, waiting(getattr(os, name)))
    safetensors.torch.save_file = waiting(safetensors.torch.save_file)  # which opens a file by itself


def race(random: Random, lines: list[str], home: Path, kill: bool) -> list[Writer]:
    """Run commands at once, in an order that is drawn; with `kill`, the first of them is killed somewhere."""
    end = random.randrange(1, 150) if kill else None
    writers: list[Writer] = []
    try:
        writers += [Writer.start(line, home) for line in lines]
        while running := [writer for writer in writers if writer.done is None]:
            writer = random.choice(running)
            for _ in range(random.choice((1, 1, 5, 30, 200))):
                if writer.done is None:
                    writer.go_on()
                if writer is writers[0] and writer.calls == end:
                    writer.kill()
        return writers
    finally:
        for writer in writers:
            writer.kill()
