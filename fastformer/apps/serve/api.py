"""The JSON API and the page of `fastformer serve`, as a Starlette application.

Every answer is JSON. An error has status 400 to 500 and `{"error": "one line"}`.
"""

import asyncio
import json
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from fastformer.apps.settings import Settings, declared, facts, refuse_idle
from fastformer.apps.text.files import encode_text
from fastformer.settings import check_value

CHARACTERS = 5000  # of a text
_BYTES = 12 * CHARACTERS + 10_000  # of a request; JSON takes up to 12 for a character: \\ud83d\\ude00
_MOST = {"beam": 16, "max_length": 512, "max_new_tokens": 512}  # settings that bound the work of a request
_PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_LOCAL = ["127.0.0.1", "localhost", "::1", "[::1]"]


def application(
    run: str, action: str, settings: type[Settings], compute: Callable[[str, Any], Any], host: str
) -> Starlette:
    """Return the application for one model, which computes one request at a time.

    Args:
        run: name of the run, shown on the page.
        action: name of the endpoint, such as "translate".
        settings: settings that a request may give.
        compute: returns a JSON value for a text and settings.
        host: address of the server; at a local one, only requests that name a local host are answered.
    """
    model = asyncio.Lock()

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _POLICY})

    async def describe(request: Request) -> Response:
        offered = [
            {
                "name": item.name,
                "default": item.default,
                "help": item.metadata["description"],
                "type": (typing.get_args(hint) or (hint,))[0].__name__,  # of int | None: int
                "at_least": facts(item)["bounds"].get("at_least"),
            }
            for item, hint in declared(settings)
        ]
        return JSONResponse({"run": run, "action": action, "settings": offered, "characters": CHARACTERS})

    async def answer(request: Request) -> Response:
        body = await _body(request)
        text = _text(body)
        options = _options(settings, body)
        async with model:
            return JSONResponse(await run_in_threadpool(compute, text, options))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404:
            detail = f"there is no {request.url.path}; this model has POST /api/{action}"
        return _error(error.status_code, detail)

    handlers: dict[Any, Any] = {
        HTTPException: http_error,
        ValueError: lambda request, error: _error(400, " ".join(str(error).split())),
        Exception: lambda request, error: _error(500, "the model failed; the server's log has the reason"),
    }
    routes = [Route("/", page), Route("/api/model", describe), Route(f"/api/{action}", answer, methods=["POST"])]
    # A page elsewhere may resolve its name to 127.0.0.1.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL if host in _LOCAL else ["*"])
    return Starlette(routes=routes, middleware=[hosts], exception_handlers=handlers)


async def _body(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request, at most as many bytes as the longest text takes."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _BYTES:
            raise HTTPException(413, f"the request is larger than {_BYTES:,} bytes")
    try:
        body = json.loads(data)
    except ValueError as error:
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
        raise HTTPException(413, f"text has {len(text):,} characters; at most {CHARACTERS:,} are read")
    encode_text(text, "text")
    return text


def _options(settings: type[Settings], values: dict[str, Any]) -> Any:
    """Return the settings of a request; raise ValueError for one that is unknown, too large or without effect."""
    options = settings(**values)
    refuse_idle({"": values}, {"": options})
    limits = {name: most for name, most in _MOST.items() if hasattr(options, name)}
    for name, most in limits.items():
        check_value(name, values.get(name), int | None, at_most=most)
    return replace(options, **{name: min(getattr(options, name) or most, most) for name, most in limits.items()})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
