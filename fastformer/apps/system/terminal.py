"""Text for a person, on a stream that may break: closed, a pipe that nobody reads, a full disk behind a log file.

What is shown is never worth what is computed: the first write that fails turns the showing off, and raises nothing.
Names and vocabularies come with files that may be a stranger's, and a terminal obeys what it is sent: control
characters are shown as escapes there, and so are those that turn the order of what follows (U+202E and its like; the
marks of Arabic and Hebrew texts, which turn nothing else, stay).
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    r"""A text with its control characters but tabs and ends of lines as escapes such as \x1b."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1] if found[0] > "\xff" else f"\\x{ord(found[0]):02x}", text)


def shown(text: str) -> str:
    """A text for standard output: `escaped` on a terminal; files and pipes get it as it is."""
    return escaped(text) if Terminal(sys.stdout).isatty() else text


def sizes(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings to add where a shell exports that its terminal has no size: rich would lay out nothing in it."""
    found = zip(("COLUMNS", "LINES"), shutil.get_terminal_size(), strict=True)
    return {name: str(size) for name, size in found if not environment.get(name, "1").strip("0")}


class Terminal:
    """Writes to `stream` until that fails; None: to nothing. It has what `print` and rich ask of a file."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """Of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write, or stop writing."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):  # the latter where it is closed
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush, or stop writing."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def line(self, text: str) -> None:
        """Write a line at once, `escaped` on a terminal."""
        self.write(f"{escaped(text) if self.isatty() else text}\n")
        self.flush()

    def isatty(self) -> bool:
        """Whether a person sees it."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        """Of the stream, whose size rich asks for."""
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()


def give_up_on(stream: TextIO | None) -> None:
    """Before the end of a process: where a stream cannot be flushed, let the rest go nowhere.

    Else Python would end with its exit code 120 and a message.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
