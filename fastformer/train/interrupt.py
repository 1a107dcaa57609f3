"""Ctrl-C as a request: the first is noted and the loop ends where it can, the second ends everything at once."""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


class Interrupt:
    """While active, the first SIGINT sets `requested` and calls `notice`; the next raises KeyboardInterrupt.

    Only the main thread may set signal handlers: in another thread this does nothing.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self.requested = False
        self._notice = notice
        self._previous: Any = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        with suppress(RuntimeError):  # the signal may have come in the middle of a write to the same stream
            self._notice()

    def _restore(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
