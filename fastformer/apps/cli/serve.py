"""`fastformer serve`: a page and a JSON API for one model."""

import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fastformer.apps.cli.console import Checkpoint, Device, RunFolder, app, choose_device, console
from fastformer.apps.cli.options import USE, whole_number
from fastformer.settings import check_value


@app.command(rich_help_panel=USE)
def serve(
    run: RunFolder,
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0: every network")] = "127.0.0.1",
    port: Annotated[int, whole_number("port to listen at; 0: any free one")] = 8000,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Serve a page and a JSON API on this machine to try a run's model. Ctrl-C ends it."""
    try:
        import uvicorn

        from fastformer.apps.serve.api import Api
        from fastformer.apps.serve.served_model import served_model
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ImportError(f"serving needs {error.name}: pip install 'fastformer[serve]'") from None
    check_value("port", port, int, at_least=0, at_most=65_535)
    with listen(host, port) as listener:
        model = served_model(run, checkpoint, choose_device(device))
        application = Api(model, Path(run).resolve().name).application(host)
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        console.print(f"Serving {run} at http://{shown}:{address[1]} (Ctrl-C ends)")
        console.file.flush()  # into a pipe, too
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=75,
        )
        with suppress(KeyboardInterrupt):  # raised again by uvicorn after a clean end
            uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; OSError names the address and the reason."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
