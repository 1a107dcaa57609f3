"""Run a model in one thread; requests that wait together become a batch."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from fastformer.apps.plots.attention_maps import AttentionMaps
from fastformer.apps.settings import Settings


class ServedModel(NamedTuple):
    """What the API needs of a model; `serve_run` in the `commands.py` of an application returns it.

    Attributes:
        action: name of the endpoint, such as "translate".
        settings: settings that a request may give, and that are shown on the page.
        compute: returns a JSON value for each text.
        attention: returns the attention weights of a text; of a translation, those of the decoder to the source.
        stream: yields the result for a text in pieces; None: results have no pieces.
    """

    action: str
    settings: type[Settings]
    compute: Callable[[list[str], Any], list[Any]]
    attention: Callable[[str], AttentionMaps]
    stream: Callable[[str, Any], Iterator[str]] | None = None


class QueueFullError(Exception):
    """Too many requests wait already."""


class _Request(NamedTuple):
    text: str
    options: Any
    result: Future[Any]


class ModelWorker:
    """Compute results for texts in one thread, in the order of the requests.

    Args:
        compute: takes texts and options, and returns a result for each text.
        batch_size: texts computed at a time; they differ, and have equal options.
        queue_size: requests that may wait at a time, streams included.
    """

    def __init__(
        self, compute: Callable[[list[str], Any], list[Any]], batch_size: int = 32, queue_size: int = 256
    ) -> None:
        self._compute, self._batch_size, self._queue_size = compute, batch_size, queue_size
        self._waiting: list[_Request] = []
        self._lock = threading.Lock()  # of the list
        self._places = asyncio.Semaphore(queue_size)  # of requests that wait or are computed
        self._thread = ThreadPoolExecutor(1, "model")

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._places.locked():
            raise QueueFullError(f"{self._queue_size} requests wait already; try again later")
        async with self._places:
            yield

    async def submit(self, text: str, options: Any) -> Any:
        """Return the result for a text.

        Raises:
            QueueFullError: `queue_size` requests wait already.
        """
        async with self._place():
            request = _Request(text, options, Future())
            with self._lock:
                self._waiting.append(request)
            self._thread.submit(self._compute_batch)  # a call for each request: an earlier one may have computed it
            return await asyncio.wrap_future(request.result)

    async def stream(self, pieces: Iterator[str]) -> AsyncIterator[str]:
        """Yield the pieces of an iterator; between two pieces the thread computes other requests.

        Raises:
            QueueFullError: `queue_size` requests wait already.
        """
        async with self._place():
            while (piece := await self.call(next, pieces, None)) is not None:
                yield piece

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns in the model's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _compute_batch(self) -> None:
        """Compute the first request that waits, and others of equal options and different texts."""
        batch: dict[str, _Request] = {}
        with self._lock:
            for request in self._waiting:
                if request.options == self._waiting[0].options and len(batch) < self._batch_size:
                    batch.setdefault(request.text, request)
            for request in batch.values():
                self._waiting.remove(request)
        # Without the requests whose clients have gone or waited for too long.
        self._answer([request for request in batch.values() if request.result.set_running_or_notify_cancel()])

    def _answer(self, batch: list[_Request]) -> None:
        if not batch:
            return
        try:
            results = self._compute([request.text for request in batch], batch[0].options)
        except Exception as error:
            if len(batch) == 1:
                batch[0].result.set_exception(error)
            else:  # only the requests that fail by themselves get the error
                for request in batch:
                    self._answer([request])
            return
        for request, result in zip(batch, results, strict=True):
            request.result.set_result(result)
