"""Output on a stream that may fail: closed, a pipe without a reader, a log file on a full disk."""

import os
from contextlib import suppress
from typing import TextIO


class Terminal:
    """Writes to `stream` until a write fails, then discards output; has the methods that `print`, logging and rich use.

    stream: None discards all output.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, flush: bool = False) -> int:
        """Write a text; discard it, and all later output, if that fails."""
        if self._stream is not None:
            try:
                self._stream.write(text)
                if flush:
                    self._stream.flush()
            except (OSError, ValueError):  # ValueError: it is closed, or cannot encode the text
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush the stream; discard all later output if that fails."""
        self.write("", flush=True)

    def line(self, text: str) -> None:
        """Write a line and flush it."""
        self.write(f"{text}\n", flush=True)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and not getattr(self._stream, "closed", False) and self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor, by which rich reads the size of the terminal."""
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()


def discard_if_broken(stream: TextIO | None) -> None:
    """Redirect a stream to /dev/null if it cannot be flushed: Python would end with exit status 120."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
