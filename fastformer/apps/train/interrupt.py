"""Signals as requests: the first one lets the loop finish its step and end; a second Ctrl-C ends the process at once.

SIGTERM (a scheduler, a machine that shuts down) and SIGHUP (a terminal that closes, often twice) are requests, too.
They are handled only if they would end the process: a caller's handler stays, and signals ignored by nohup stay so.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any


class Interrupt:
    """In the block, the first signal sets `signal` to its number, calls `notice` and restores SIGINT's handler.

    Only the main thread may set signal handlers: in another thread this does nothing.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        self.signal: int | None = None
        self._notice = notice
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
            for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in list(self._previous):
            self._restore(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore(signal.SIGINT)
        if self.signal is None:
            self.signal = int(number)
            with suppress(RuntimeError):  # the signal may have interrupted a write to the same stream
                self._notice()

    def _restore(self, number: int) -> None:
        if number in self._previous:
            signal.signal(number, self._previous.pop(number))
