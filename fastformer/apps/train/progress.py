"""Progress output of a run: loss, tokens per second and time left, and a line for every validation.

A terminal shows rich's bar. A log file or a pipe, where a bar would be thousands of lines, gets a plain line every few
seconds. A stream that cannot be written to ends the output, not the run.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_PLAIN_SECONDS, _BAR_SECONDS = 10.0, 1.0  # between two updates
_NOT_SHOWN = ("kind", "step", "epoch", "seconds", "tokens", "gradient_norm")


class Progress:
    """Shows a run on `stream` (standard error by default). `enabled=False` shows nothing. `clock`: in seconds.

    `unit`: what `tokens` of a batch counts.
    """

    def __init__(
        self,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "tokens",
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled, self._clock, self._unit = enabled and self._stream is not None, clock, unit
        self._bar: Any = None
        self._next = -math.inf  # when the next update is due: the first one after the first step
        self._next_epoch = -math.inf  # when the next epoch's line is due

    def __enter__(self) -> "Progress":
        if self._enabled and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.fields[text]}  left {task.fields[left]}")
            console = Console(file=self._stream)
            self._bar = Bar(BarColumn(bar_width=20), TaskProgressColumn(), text, console=console, refresh_per_second=2)
            self._bar.add_task("training", total=1.0, text="starting", left="?")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def due(self) -> bool:
        """Return whether `step` would show something now."""
        return self._enabled and self._clock() >= self._next

    def step(self, record: dict[str, Any], progress: float, seconds_left: float) -> None:
        """Show the numbers of the last steps, if `due`; `progress` is the spent share of the budget."""
        if not self.due():
            return
        text, left = describe(record, self._unit), "?"
        if math.isfinite(seconds_left):
            minutes, seconds = divmod(max(round(seconds_left), 0), 60)
            left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
        self._next = self._clock() + (_PLAIN_SECONDS if self._bar is None else _BAR_SECONDS)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=progress, text=text, left=left)
        else:
            self.line(f"{progress:4.0%}  {text}  left {left}")

    def record(self, record: dict[str, Any] | None, best: bool = False) -> None:
        """Print the record of a validation or an epoch, if there is one; call it once the results in it are saved.

        Epochs that end within ten seconds of the last one that was printed are not printed.
        """
        if record is None:
            return
        kind = record["kind"]
        if kind == "epoch":
            if self._clock() < self._next_epoch:
                return
            kind, self._next_epoch = "mean of training", self._clock() + _PLAIN_SECONDS
        self.line(f"{kind}: {describe(record)}" + ("  best so far, saved" if best else ""))

    def line(self, text: str) -> None:
        """Print a line that stays, such as the summary of a validation or the reason of the end."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, emoji=False, highlight=False)
            return
        try:
            if self._enabled:
                print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # a full disk, a closed pipe, a closed stream
            self._enabled = False


def describe(record: dict[str, Any], unit: str = "tokens") -> str:
    """Return a record as one line: epoch, step, and its numbers with readable precision."""
    values = [f"epoch {record['epoch']}", f"step {record['step']:,}"]
    for name, value in record.items():
        if name == "tokens_per_second":
            values.append(f"{value:,.0f} {unit}/s")
        elif name == "lr":
            values.append(f"lr {value:.2e}")
        elif name not in _NOT_SHOWN and isinstance(value, float):
            signature = record.get(f"{name}_signature")
            values.append(f"{name} {readable(value)}" + (f" ({signature})" if signature else ""))
    return "  ".join(values)


def readable(value: float) -> str:
    """Return a number with two decimals, or four digits if it is small, or large as the perplexity of a long word."""
    return f"{value:.2f}" if 1 <= abs(value) < 1e6 else f"{value:.4g}"
