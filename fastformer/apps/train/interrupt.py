"""Ctrl-C as a request: the first one lets the loop finish its step and end, a second one ends the process at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def interruptible(notice: Callable[[], None]) -> Iterator[threading.Event]:
    """Yield an event; the first Ctrl-C in the block sets it, calls `notice`, and restores the signal handler.

    Only the main thread may set signal handlers: in another thread the event is never set.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        requested.set()
        with suppress(RuntimeError):  # the signal may have interrupted a write to the same stream
            notice()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, previous)
