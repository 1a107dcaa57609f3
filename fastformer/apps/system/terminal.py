"""Output for a person, on a stream that may break: closed, a pipe that nobody reads, a log file on a full disk."""

import os
from contextlib import suppress
from typing import TextIO


class Terminal:
    """Writes to `stream` until a write fails, and then to nothing; it has what `print`, logging and rich ask of a file.

    stream: None writes to nothing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """Return the stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, flush: bool = False) -> int:
        """Write, or stop writing."""
        if self._stream is not None:
            try:
                self._stream.write(text)
                if flush:
                    self._stream.flush()
            except (OSError, ValueError):  # the latter if it is closed, or cannot encode the text
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush, or stop writing."""
        self.write("", flush=True)

    def line(self, text: str) -> None:
        """Write a line at once."""
        self.write(f"{text}\n", flush=True)

    def isatty(self) -> bool:
        """Return whether a person sees it."""
        return self._stream is not None and not getattr(self._stream, "closed", False) and self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor, whose size rich asks for."""
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
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
