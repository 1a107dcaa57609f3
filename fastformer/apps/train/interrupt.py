"""Ctrl-C as a request: the first one lets the loop finish its step and end, a second one ends the process at once."""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


class Interrupt:
    """In the block, the first Ctrl-C sets `requested`, calls `notice` and restores the handler.

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
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self.requested = True
        with suppress(RuntimeError):  # the signal may have interrupted a write to the same stream
            self._notice()
