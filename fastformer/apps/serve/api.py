"""The JSON API and the page of `fastformer serve`, as a Starlette application.

Every answer is JSON. An error has status 400 to 504 and `{"error": "one line"}`.
"""

import asyncio
import json
import typing
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fastformer.apps.serve.worker import ModelWorker, QueueFullError, ServedModel
from fastformer.apps.settings import Settings, make_settings, typed_fields
from fastformer.apps.text.files import encode_text
from fastformer.settings import check_value

CHARACTERS = 5000  # of a text
SECONDS = 60.0  # of a request
MOST = {"beam": 16, "max_length": 512, "max_new_tokens": 512}  # values of settings
_OF_THE_PROCESS = ("cuda_graphs",)  # settings that a request may not give
_MOST_BYTES = 12 * CHARACTERS + 10_000  # of a request; a character takes up to 12 as JSON: \\ud83d\\ude00
_PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


class Api:
    """The endpoints of one model, which all of them share; `name` of the run is shown on the page."""

    def __init__(self, model: ServedModel, name: str) -> None:
        self.model, self.name, self.worker = model, name, ModelWorker(model.compute)

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
            TimeoutError: lambda request, error: _error(504, _late()),
            Exception: lambda request, error: _error(500, "the model failed; the server's log has the reason"),
        }
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

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
            for item, hint in typed_fields(self.model.settings)
            if item.name not in _OF_THE_PROCESS
        ]
        about = {"run": self.name, "action": self.model.action, "stream": self.model.stream is not None}
        limits = {"characters": CHARACTERS, "seconds": SECONDS, **MOST}
        return JSONResponse({**about, "settings": settings, "limits": limits})

    async def compute(self, request: Request) -> Response:
        """`POST /api/ACTION`: the result for a text; with `"stream": true` a line of JSON for each piece."""
        body = await _body(request)
        stream: bool = check_value("stream", body.pop("stream", False), bool)
        text = _text(body)
        options = _options(self.model.settings, body)
        if not stream:
            return JSONResponse(await _timed(self.worker.submit(text, options)))
        if self.model.stream is None:
            raise ValueError("stream is for language models")
        return StreamingResponse(self._lines(self.model.stream(text, options)), media_type="application/x-ndjson")

    async def attention(self, request: Request) -> Response:
        """`POST /api/attention`: the weights of a layer and head (numbers from 1), or the mean of the heads."""
        body = await _body(request)
        layer, head, text = body.pop("layer", None), body.pop("head", None), _text(body)
        for name in body:
            raise ValueError(f"unknown setting {name!r}; known: head, layer, text")
        attention = await _timed(self.worker.call(self.model.attention, text))
        layers, heads = attention.weights.shape[:2]
        check_value("layer", layer, int | None, at_least=1, at_most=layers)
        check_value("head", head, int | None, at_least=1, at_most=heads)
        weights = attention.weights[layer - 1 if layer else -1]
        weights = weights[head - 1] if head else weights.mean(0)
        rounded = [[round(weight, 4) for weight in row] for row in weights.tolist()]
        about = {"layers": layers, "heads": heads, "keys": attention.keys, "queries": attention.queries}
        return JSONResponse({**about, "weights": rounded})

    async def _lines(self, pieces: Any) -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(SECONDS):
                async for piece in self.worker.stream(pieces):
                    yield json.dumps({"piece": piece}) + "\n"
            yield json.dumps({"done": True}) + "\n"
        except TimeoutError:
            yield json.dumps({"error": _late()}) + "\n"
        except (QueueFullError, FloatingPointError) as error:
            yield json.dumps({"error": str(error)}) + "\n"

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404:
            detail = f"there is no {request.url.path}; this model has POST /api/{self.model.action}"
        return _error(error.status_code, detail, error.headers)


async def _page(request: Request) -> Response:
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _POLICY})


async def _timed(result: Awaitable[Any]) -> Any:
    """Return a result of the model; raise TimeoutError after the limit, and an HTTP error if the server ends."""
    try:
        async with asyncio.timeout(SECONDS):
            return await result
    except asyncio.CancelledError:
        raise HTTPException(503, "the server is shutting down") from None


async def _body(request: Request) -> dict[str, Any]:
    """Read the request's JSON object, at most as many bytes as the longest text takes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MOST_BYTES:
            raise HTTPException(413, f"the request is larger than {_MOST_BYTES:,} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError('the request must be a JSON object, such as {"text": "…"}')
    return body


def _text(body: dict[str, Any]) -> str:
    """Remove the text from the body, and return it."""
    if "text" not in body:
        raise ValueError('text must be given: {"text": "…"}')
    text: str = check_value("text", body.pop("text"), str)
    if len(text) > CHARACTERS:
        raise HTTPException(413, f"text has {len(text):,} characters; at most {CHARACTERS:,} are allowed")
    encode_text(text, "text")
    return text


def _options(settings: type[Settings], values: dict[str, Any]) -> Any:
    """Return the settings of a request; raise ValueError for one that is unknown, too large or without effect."""
    if refused := [name for name in _OF_THE_PROCESS if name in values]:
        raise ValueError(f"{refused[0]} cannot be set by a request")
    options = make_settings(settings, values)
    limits = {name: most for name, most in MOST.items() if hasattr(options, name)}
    for name, most in limits.items():
        check_value(name, values.get(name), int | None, at_most=most)
    return replace(options, **{name: min(getattr(options, name) or most, most) for name, most in limits.items()})


def _late() -> str:
    return f"no result after {SECONDS:g} s"


def _error(status: int, message: str, headers: Any = None) -> Response:
    return JSONResponse({"error": message}, status, headers)
