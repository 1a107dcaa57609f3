"""Run a model in one thread; requests that wait together become a batch."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class QueueFullError(Exception):
    """Too many requests wait already."""


class _Request(NamedTuple):
    text: str
    options: Any
    result: asyncio.Future[Any]


class ModelWorker:
    """Compute results for texts in one thread, in the order of the requests.

    Args:
        compute: takes texts and options, and returns a result for each text.
        batch_size: texts computed at a time; they have equal options.
        queue_size: requests that may wait at a time, streams included.
    """

    def __init__(self, compute: Callable[[list[str], Any], list[Any]], batch_size: int, queue_size: int) -> None:
        self._compute, self._batch_size, self._queue_size = compute, batch_size, queue_size
        self._waiting: list[_Request] = []
        self._streams = 0
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")

    async def submit(self, text: str, options: Any) -> Any:
        """Return the result for a text.

        Raises:
            QueueFullError: as many requests wait as may.
        """
        self.check_space()
        request = _Request(text, options, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrival.set()
        try:
            return await request.result
        finally:
            if request in self._waiting:  # the client has gone, or waited for too long
                self._waiting.remove(request)

    async def stream(self, pieces: Iterator[str]) -> AsyncIterator[str]:
        """Yield the pieces of an iterator; between two pieces the thread computes other requests.

        Raises:
            QueueFullError: as many requests wait as may.
        """
        self.check_space()
        self._streams += 1
        try:
            while (piece := await self.call(next, pieces, None)) is not None:
                yield piece
        finally:
            self._streams -= 1

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in the model's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def run(self) -> None:
        """Compute requests until cancelled."""
        while True:
            if not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            options = self._waiting[0].options
            batch = [request for request in self._waiting if request.options == options][: self._batch_size]
            self._waiting = [request for request in self._waiting if request not in batch]
            await self._answer(batch, options)

    async def _answer(self, batch: list[_Request], options: Any) -> None:
        try:
            results = await self.call(self._compute, [request.text for request in batch], options)
        except Exception as error:
            if len(batch) > 1:  # only the requests that fail by themselves get the error
                for request in batch:
                    await self._answer([request], options)
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for request, result in zip(batch, results, strict=True):
            if not request.result.done():
                request.result.set_result(result)

    def close(self) -> None:
        """End the thread after the batch that it computes; other requests are cancelled."""
        for request in self._waiting:
            request.result.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def check_space(self) -> None:
        """Raise QueueFullError if as many requests wait as may."""
        if len(self._waiting) + self._streams >= self._queue_size:
            raise QueueFullError(f"{self._queue_size} requests wait already; try again later")
