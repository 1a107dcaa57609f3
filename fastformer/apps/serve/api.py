"""The JSON API and the page of `fastformer serve`, as a Starlette application.

Every answer is JSON. An error has status 400 to 504 and `{"error": "one line"}`.
"""

import asyncio
import json
import typing
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fastformer.apps.serve.served_model import ServedModel
from fastformer.apps.serve.worker import ModelWorker, QueueFullError
from fastformer.apps.settings import declared, to_plain
from fastformer.apps.text.files import encode_text
from fastformer.settings import check_value

_PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_MOST_BYTES = 12  # of JSON for a character of text: \\ud83d\\ude00
_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True)
class Limits:
    """Limits of requests: texts computed at a time, waiting requests, characters, tokens written, and seconds."""

    batch_size: int = 32
    queue_size: int = 256
    characters: int = 5000
    tokens: int = 512
    seconds: float = 60.0


class Api:
    """The endpoints of one model.

    Args:
        model: the model, which all endpoints share.
        name: name of the run, shown on the page.
        limits: limits of requests.
    """

    def __init__(self, model: ServedModel, name: str, limits: Limits = Limits()) -> None:
        self.model, self.name, self.limits = model, name, limits
        self.worker = ModelWorker(model.compute, limits.batch_size, limits.queue_size)

    def application(self, host: str) -> Starlette:
        """Return the application; at a local address it answers only requests that name a local host."""
        hosts = list(_LOCAL) if host in _LOCAL else ["*"]  # a page elsewhere may resolve its name to 127.0.0.1
        routes = [
            Route("/", _page),
            Route("/api/model", self.describe),
            Route(f"/api/{self.model.action}", self.compute, methods=["POST"]),
            Route("/api/attention", self.attention, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: self._http_error,
            ValueError: lambda request, error: _error(400, " ".join(str(error).split())),
            QueueFullError: lambda request, error: _error(503, str(error), {"Retry-After": "1"}),
            TimeoutError: lambda request, error: _error(504, self._late()),
            Exception: lambda request, error: _error(500, "the model failed; the server's log has the reason"),
        }
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.worker.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.worker.close()

    async def describe(self, request: Request) -> Response:
        """`GET /api/model`: the run's name, the endpoint, its settings with their help, and the limits."""
        settings = [
            {
                "name": item.name,
                "default": item.default,
                "help": item.metadata["description"],
                "type": (typing.get_args(hint) or (hint,))[0].__name__,  # of int | None: int
                "bounds": {name: x for name, x in item.metadata["bounds"].items() if not isinstance(x, str)},
            }
            for item, hint in declared(self.model.settings)
            if item.name not in self.model.not_offered
        ]
        about = {"run": self.name, "action": self.model.action, "stream": hasattr(self.model, "stream")}
        return JSONResponse({**about, "settings": settings, "limits": to_plain(self.limits)})

    async def compute(self, request: Request) -> Response:
        """`POST /api/ACTION`: the result for a text; with `"stream": true` a line of JSON for each piece."""
        body = await self._body(request)
        stream: bool = check_value("stream", body.pop("stream", False), bool)
        text = self._text(body)
        options = self.model.options(body, self.limits.tokens)
        if not stream:
            return JSONResponse(await self._timed(self.worker.submit(text, options)))
        if not hasattr(self.model, "stream"):
            raise ValueError("stream is for language models")
        self.worker.check_space()
        pieces = await self._timed(self.worker.call(self.model.stream, text, options))
        return StreamingResponse(self._lines(pieces), media_type="application/x-ndjson")

    async def attention(self, request: Request) -> Response:
        """`POST /api/attention`: the weights of a layer and head (numbers from 1), or the mean of the heads."""
        body = await self._body(request)
        layer, head, text = body.pop("layer", None), body.pop("head", None), self._text(body)
        for name in body:
            raise ValueError(f"unknown setting {name!r}; known: head, layer, text")
        attention = await self._timed(self.worker.call(self.model.attention, text))
        layers, heads = attention.weights.shape[:2]
        check_value("layer", layer, int | None, at_least=1, at_most=layers)
        check_value("head", head, int | None, at_least=1, at_most=heads)
        weights = attention.weights[layer - 1 if layer else -1]
        weights = weights[head - 1] if head else weights.mean(0)
        rounded = [[round(weight, 4) for weight in row] for row in weights.tolist()]
        about = {"layers": layers, "heads": heads, "keys": attention.keys, "queries": attention.queries}
        return JSONResponse({**about, "weights": rounded})

    async def _timed(self, result: Awaitable[Any]) -> Any:
        """Return a result of the model; raise TimeoutError after the limit, and an HTTP error if the server ends."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                return await result
        except asyncio.CancelledError:
            raise HTTPException(503, "the server is shutting down") from None

    def _text(self, body: dict[str, Any]) -> str:
        if "text" not in body:
            raise ValueError('text must be given: {"text": "…"}')
        text: str = check_value("text", body.pop("text"), str)
        if len(text) > self.limits.characters:
            raise HTTPException(413, f"text has {len(text):,} characters; at most {self.limits.characters:,} are read")
        encode_text(text, "text")
        return text

    async def _lines(self, pieces: Any) -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for piece in self.worker.stream(pieces):
                    yield json.dumps({"piece": piece}) + "\n"
            yield json.dumps({"done": True}) + "\n"
        except TimeoutError:
            yield json.dumps({"error": self._late()}) + "\n"
        except (QueueFullError, FloatingPointError) as error:
            yield json.dumps({"error": str(error)}) + "\n"

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read the request's JSON object, at most as many bytes as the longest text takes."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
        data, most = bytearray(), self.limits.characters * _MOST_BYTES + 10_000
        async for part in request.stream():
            data += part
            if len(data) > most:
                raise HTTPException(413, f"the request is larger than {most:,} bytes")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise ValueError(f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ValueError('the request must be a JSON object, such as {"text": "…"}')
        return body

    def _late(self) -> str:
        return f"no result after {self.limits.seconds:g} s"

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404:
            detail = f"there is no {request.url.path}; this model has POST /api/{self.model.action}"
        return _error(error.status_code, detail, error.headers)


async def _page(request: Request) -> Response:
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _POLICY})


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": message}, status, headers)
