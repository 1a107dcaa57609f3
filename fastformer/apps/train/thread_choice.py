"""How many threads a run by the clock computes with: as many as torch has, or one, whichever is faster just now.

Two threads wait for each other in every operation. On an idle machine they spin for that moment (`fastformer.apps.cli`
says how long), and a small model trains 1.4 to 1.5 times as fast as with one; where another process is on one of the
cores they wait for the scheduler, and one thread is 1.4 to 1.8 times as fast as two. So both are tried for a moment,
and again as time goes by. Sums of another order round differently: a run of so many steps or epochs, which promises the
same bits, keeps torch's number of threads.
"""

import os
from collections.abc import Generator

import torch

from fastformer.apps.train.config import TrainConfig

_TRIAL = 2.0  # seconds of steps that decide: 10 to 20 of a small model, whose speed then varies by some 5 %
_SHARE = 30.0  # times as long as the slower one's trial the faster one is kept: it costs 3 % of what it loses
_DROP = 0.8  # of the speed a moment ago: something has come to pass, and the other is tried at once
# More than so many threads a processor only wait for each other, and each takes megabytes of stack.
_THREADS_A_PROCESSOR = 4


def check_threads(threads: int | None) -> None:
    """Raise ValueError for more threads than this machine can use; torch crashes where it cannot start as many."""
    most = _THREADS_A_PROCESSOR * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise ValueError(f"threads must be at most {most} here, {_THREADS_A_PROCESSOR} a processor, not {threads}")


class ThreadChoice:
    """Changes torch's number of threads between the steps of a run that only the clock ends; `close` sets it back.

    allowed: the run has a CPU, and that for itself.
    """

    def __init__(self, config: TrainConfig, allowed: bool = True) -> None:
        self._most = torch.get_num_threads()
        by_clock = config.steps is None and config.epochs is None and config.threads is None
        self._chooses = allowed and by_clock and self._most > 1
        self._choices = _choices(self._most)
        self._tokens, self._seconds = 0, 0.0
        self._begun = False  # the first step of all makes what later ones find
        next(self._choices)

    def step(self, tokens: int, seconds: float) -> None:
        """Tell of a step, its tokens and how long it took, and choose for the next."""
        if not self._begun:
            self._begun = True
            return
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if self._seconds >= _TRIAL and self._chooses:
            torch.set_num_threads(self._choices.send((self._tokens / self._seconds, self._seconds)))
            self._tokens, self._seconds = 0, 0.0

    def close(self) -> None:
        """Set torch's number of threads back to what it was."""
        torch.set_num_threads(self._most)


def _choices(most: int) -> Generator[int, tuple[float, float], None]:
    """The number of threads for each span; told its speed and length in turn."""
    kept, share = most, _SHARE
    speed, _ = yield kept
    while True:
        other = most if kept == 1 else 1
        rival, trial = yield other
        # Who has just won may owe it to a moment, and is to show it again soon.
        share = 2.0 if rival > speed else min(2 * share, _SHARE)
        if rival > speed:
            kept, speed = other, rival
        left = share * trial
        while left > 0:
            before = speed
            speed, seconds = yield kept
            left = left - seconds if speed >= _DROP * before else 0.0
